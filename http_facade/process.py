"""One process that answers requests: its logs, its spans, and its facade until a signal."""

from __future__ import annotations

import asyncio
import logging
import sys
from dataclasses import replace

from http_facade.flags import FacadeConfig


def configure_logs(config: FacadeConfig) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )


def run_facade(config: FacadeConfig, *, shares_port: bool = False) -> int:
    """Returns the exit code. `shares_port`: other processes listen on it, too."""
    from http_facade.access_log import configure_access_log
    from http_facade.open_files import allow_connections
    from http_facade.server import serve  # heavy; --print-flags and --help do without
    from traces.setup import configure_tracing

    configure_logs(config)
    configure_access_log(config.edge.access_log)
    config = replace(config, max_connections=allow_connections(config.max_connections))
    tracing = configure_tracing(
        "firsttoken-facade",
        directory=config.trace_dir,
        otlp_endpoint=config.otlp_traces_endpoint,
        sample_ratio=config.trace_sample_ratio,
        holds=config.trace_slow_ttft_ms > 0,
    )
    try:
        return asyncio.run(serve(config, shares_port=shares_port))
    finally:
        tracing.shutdown()
