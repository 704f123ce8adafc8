"""A stretch of work as a span, by the clock that all spans of a process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, Tracer

from traces.clock import now_unix_ns


@contextmanager
def stage(tracer: Tracer, name: str, *, start_unix_ns: int | None = None) -> Iterator[Span]:
    """A child of the current span, and current inside the block; it ends whatever happens.

    `start_unix_ns`: where the work began before the block (None: it did not).
    """
    span = tracer.start_span(name, start_time=start_unix_ns or now_unix_ns())
    try:
        with trace.use_span(span, record_exception=False, set_status_on_exception=False):
            yield span
    finally:
        span.end(now_unix_ns())
