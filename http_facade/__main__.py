"""`python -m http_facade --engine HOST:PORT`."""

from __future__ import annotations

import os
import sys

from http_facade.flags import FacadeConfig, build_parser, config_from_args, flags_json
from http_facade.process import configure_logs, run_facade


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if args.print_flags:
        print(flags_json(parser))
        return 0
    try:
        config = config_from_args(args)
    except ValueError as error:
        parser.error(str(error))
    _wake_without_preempting()
    return _run(config)


def _wake_without_preempting() -> None:
    """An engine on the same machine computes on, a few milliseconds at most, when this process has
    something to do: it would stop a step otherwise (sched(7): SCHED_BATCH)."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run(config: FacadeConfig) -> int:
    if config.workers == 1:
        return run_facade(config)
    from http_facade.workers import run_workers

    configure_logs(config)
    return run_workers(config, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
