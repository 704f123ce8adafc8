"""`python -m http_facade --engine HOST:PORT`."""

from __future__ import annotations

import asyncio
import logging
import sys

from http_facade.flags import FacadeConfig, build_parser, config_from_args, flags_json


def main() -> int:
    parser = build_parser()
    args = parser.parse_args()
    if args.print_flags:
        print(flags_json(parser))
        return 0
    return _run(config_from_args(args))


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
