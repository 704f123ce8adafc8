"""`python -m http_facade --engine HOST:PORT`."""

from __future__ import annotations

import asyncio
import logging
import os
import sys

from http_facade.flags import FacadeConfig, build_parser, config_from_args, flags_json


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if args.print_flags:
        print(flags_json(parser))
        return 0
    _wake_without_preempting()
    return _run(config_from_args(args))


def _wake_without_preempting() -> None:
    """An engine on the same machine computes on, a few milliseconds at most, when this process has
    something to do: it would stop a step otherwise (sched(7): SCHED_BATCH)."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _run(config: FacadeConfig) -> int:
    from http_facade.server import serve  # heavy; --print-flags and --help do without
    from traces.setup import configure_tracing

    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    tracing = configure_tracing(
        "firsttoken-facade",
        directory=config.trace_dir,
        otlp_endpoint=config.otlp_traces_endpoint,
        sample_ratio=config.trace_sample_ratio,
    )
    try:
        return asyncio.run(serve(config))
    finally:
        tracing.shutdown()


if __name__ == "__main__":
    sys.exit(main())
