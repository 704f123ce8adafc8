"""W3C trace context in gRPC metadata and HTTP headers, by OpenTelemetry's API alone.

A malformed `traceparent` yields an empty context, so that a new root is started.
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_propagator = TraceContextTextMapPropagator()


def extract(pairs: Iterable[tuple[str, str | bytes]]) -> Context:
    """The caller's context; `pairs` are headers or metadata, names in any case."""
    carrier = {
        name.lower(): value
        for name, value in pairs
        if isinstance(value, str) and name.lower() in _propagator.fields
    }
    return _propagator.extract(carrier, context=Context())


def inject(context: Context | None = None) -> tuple[tuple[str, str], ...]:
    """Metadata that carries `context` (the current one by default) to the next process."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier, context=context)
    return tuple(carrier.items())
