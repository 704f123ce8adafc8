"""Span ids that are known before their spans: so two spans can link to each other."""

from __future__ import annotations

import random
from contextvars import ContextVar

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, Tracer

_chosen: ContextVar[int | None] = ContextVar("chosen_span_id", default=None)


def new_span_id() -> int:
    """The one that was chosen for the span that is being started, else a random one."""
    return _chosen.get() or random.getrandbits(64) or 1


def future_span(parent: SpanContext) -> SpanContext:
    """Of a child to come."""
    return SpanContext(
        parent.trace_id,
        random.getrandbits(64) or 1,
        is_remote=False,
        trace_flags=parent.trace_flags,
        trace_state=parent.trace_state,
    )


def start_chosen_span(
    tracer: Tracer, chosen: SpanContext, name: str, parent: Context, start_unix_ns: int
) -> Span:
    """The span that `future_span` spoke of, if the provider is one of `traces.provider`."""
    token = _chosen.set(chosen.span_id)
    try:
        return tracer.start_span(name, context=parent, start_time=start_unix_ns)
    finally:
        _chosen.reset(token)
