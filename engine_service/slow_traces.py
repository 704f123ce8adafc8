"""Traces that begin here and are not sampled are held for a minute; the slow ones of them are kept.

Those that begin at a caller are its own affair: it says `KeepTraces`.
"""

from __future__ import annotations

from opentelemetry.trace import Span, format_trace_id

from traces.held import is_held
from traces.setup import Tracing


class SlowTraces:
    def __init__(self, tracing: Tracing, threshold_seconds: float) -> None:
        self._tracing = tracing
        self._threshold_seconds = threshold_seconds

    def judge(self, span: Span, seconds: float) -> None:
        """`seconds` to the first token, or to an end without one; of a root span."""
        context = span.get_span_context()
        if not is_held(context):
            return
        trace_id = format_trace_id(context.trace_id)
        if seconds < self._threshold_seconds:
            self._tracing.forget(trace_id)
        else:
            self._tracing.keep(trace_id)
