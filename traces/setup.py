"""One set-up for all processes: who records spans, and where they go.

With neither a directory nor an endpoint nothing is recorded and the SDK is not even imported; the
caller's trace context still travels on. Spans are exported by background threads with bounded
queues: a dead or slow exporter costs no request anything, it loses spans.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_EXPORT_DELAY_MILLIS = 1_000
_FLUSH_MILLIS = 5_000


def trace_directory(given: str | None) -> str | None:
    """Where the local store lies: what a flag says, else $FIRSTTOKEN_TRACE_DIR, else
    `firsttoken/traces` under the user's cache. "none" means no store."""
    directory = given or os.environ.get("FIRSTTOKEN_TRACE_DIR")
    if directory is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = str(Path(cache) / "firsttoken" / "traces")
    return None if directory == "none" else directory


class Tracing:
    """What `configure_tracing` set up; `shutdown` flushes it."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

    def shutdown(self) -> None:
        """Exports what is left, for at most a few seconds. Blocks; call it off the event loop."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MILLIS)
            self._provider.shutdown()


def configure_tracing(
    service_name: str,
    *,
    directory: str | None,
    otlp_endpoint: str | None,
    sample_ratio: float,
) -> Tracing:
    """Sets the process's tracer provider. Call once, before the first span.

    `sample_ratio` is for traces that start here; all others follow their parent's decision.
    Raises ValueError for a ratio outside [0, 1].
    """
    if not 0.0 <= sample_ratio <= 1.0:
        raise ValueError(f"trace sample ratio must be within [0, 1], not {sample_ratio}")
    if directory is None and otlp_endpoint is None:
        return Tracing(None)

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    exporters: list[SpanExporter] = []
    if directory is not None:
        from traces.file_store import FileSpanExporter

        exporters.append(FileSpanExporter(Path(directory), service_name))
    if otlp_endpoint is not None:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (
            OTLPSpanExporter,
        )

        exporters.append(OTLPSpanExporter(endpoint=otlp_endpoint))

    resource = Resource.create({"service.name": service_name, "process.pid": os.getpid()})
    provider = TracerProvider(
        resource=resource,
        sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        shutdown_on_exit=False,
    )
    for exporter in exporters:
        provider.add_span_processor(
            BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_DELAY_MILLIS)
        )
    trace.set_tracer_provider(provider)
    return Tracing(provider)
