"""One set-up for all processes: who records spans, and where they go.

With neither a directory nor an endpoint nothing is recorded and the SDK is not even imported; the
caller's trace context still travels on. Spans are exported by background threads with bounded
queues: a dead or slow exporter costs no request anything, it loses spans.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import TracerProvider

if TYPE_CHECKING:
    from traces.provider import FirstTokenProvider

_LAST_EXPORT_SECONDS = 5.0


def trace_directory(given: str | None) -> str | None:
    """Where the local store lies: what a flag says, else $FIRSTTOKEN_TRACE_DIR, else
    `firsttoken/traces` under the user's cache. "none" means no store."""
    directory = given or os.environ.get("FIRSTTOKEN_TRACE_DIR")
    if directory is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = str(Path(cache) / "firsttoken" / "traces")
    return None if directory == "none" else directory


class Tracing:
    """What `configure_tracing` set up. Trace ids are 32 hexadecimal digits."""

    def __init__(self, provider: FirstTokenProvider | None = None) -> None:
        self._provider = provider

    @property
    def num_dropped_spans(self) -> int:
        """Lost so far, because an exporter was too slow or failed."""
        return 0 if self._provider is None else self._provider.num_dropped_spans

    def keep(self, trace_id: str) -> None:
        """Exports a trace that was held; does nothing for any other."""
        if self._provider is not None:
            self._provider.held.keep(int(trace_id, 16))

    def forget(self, trace_id: str) -> None:
        """A trace that was held is of no interest."""
        if self._provider is not None:
            self._provider.held.forget(int(trace_id, 16))

    def shutdown(self) -> None:
        """Exports what is left, for at most a few seconds. Blocks; call it off the event loop."""
        if self._provider is None:
            return
        # In a thread that can be left: an exporter whose collector never answers heeds no timeout.
        last = threading.Thread(target=self._provider.shutdown, name="last-export", daemon=True)
        last.start()
        last.join(_LAST_EXPORT_SECONDS)


def tracing_of(provider: TracerProvider | None = None) -> Tracing:
    """What `provider`, or that of the process, can do; nothing, where it is not ours."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return Tracing()

    from traces.provider import FirstTokenProvider

    provider = provider or trace.get_tracer_provider()
    return Tracing(provider if isinstance(provider, FirstTokenProvider) else None)


def configure_tracing(
    service_name: str,
    *,
    directory: str | None,
    otlp_endpoint: str | None,
    sample_ratio: float,
    holds: bool = False,
    trusts_callers: bool = False,
) -> Tracing:
    """Sets the process's tracer provider. Call once, before the first span.

    `sample_ratio` is for traces that start here; all others follow their parent's decision. With
    `holds` those that are not sampled are held for a minute, until somebody keeps them; with
    `trusts_callers` so are those whose caller says that it holds them.
    Raises ValueError for a ratio outside [0, 1], or an endpoint that is none (see `otlp`).
    """
    if not 0.0 <= sample_ratio <= 1.0:
        raise ValueError(f"trace sample ratio must be within [0, 1], not {sample_ratio}")
    if directory is None and otlp_endpoint is None:
        return Tracing()

    from opentelemetry.sdk.trace.export import SpanExporter

    from traces.provider import FirstTokenProvider

    exporters: list[SpanExporter] = []
    if directory is not None:
        from traces.file_store import FileSpanExporter

        exporters.append(FileSpanExporter(Path(directory), service_name))
    if otlp_endpoint is not None:
        from traces.otlp import otlp_exporter

        exporters.append(otlp_exporter(otlp_endpoint))
    provider = FirstTokenProvider(
        service_name,
        exporters,
        sample_ratio=sample_ratio,
        holds=holds,
        trusts_callers=trusts_callers,
    )
    trace.set_tracer_provider(provider)
    return Tracing(provider)
