"""python -m engine_service [MODEL] flags: the engine service, until SIGTERM."""

from __future__ import annotations

import asyncio
import sys

from engine_service.config import ServiceConfig
from engine_service.cpu_policy import wake_without_preempting
from engine_service.flags import build_parser, flags_as_json, to_config
from engine_service.logs import configure_logging


def main() -> int:
    parser = build_parser()
    arguments = parser.parse_args()
    if arguments.print_flags:
        print(flags_as_json(parser))
        return 0

    # Here, not above: answers about flags need none of it.
    from engine_service.core_process import EXIT_BAD_CONFIGURATION
    from engine_service.model_error import ModelError
    from engine_service.model_store import model_name, resolve_model

    configure_logging(arguments.log_level)
    if not arguments.core_in_process:
        wake_without_preempting()
    try:
        model_dir = resolve_model(arguments.model)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    name = model_name(arguments.model, model_dir)
    try:
        config = to_config(arguments, model_dir, name)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    return asyncio.run(_serve(config))


async def _serve(config: ServiceConfig) -> int:
    from engine_service.core_launcher import open_launcher

    launcher = await open_launcher(config)

    from engine_service.service import run  # takes a while, in which the core starts

    return await run(config, launcher)


if __name__ == "__main__":
    sys.exit(main())
