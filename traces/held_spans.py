"""Spans of traces that were not sampled, held for a while: until somebody keeps their trace.

    span ends ──> ring, by trace ──keep(trace)──> exported
                       └── after a minute, or when there are too many: forgotten

Spans that end after their trace was kept are exported at once. A step is a trace of its own: it is
kept with the first of the traces that it links to.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

_HOLD_SECONDS = 60.0
_MAX_SPANS = 10_000
_MAX_VERDICTS = 10_000  # traces whose verdict is remembered


class _Held(NamedTuple):
    ended: float  # seconds, monotonic
    span: ReadableSpan
    trace_ids: frozenset[int]


class HeldSpans(SpanProcessor):
    """Spans end, and verdicts come, on any thread."""

    def __init__(self, export: Callable[[ReadableSpan], None]) -> None:
        self._export = export
        self._lock = threading.Lock()
        self._ring: deque[_Held] = deque()
        self._verdicts: OrderedDict[int, bool] = OrderedDict()  # by trace: whether it is kept

    def keep(self, trace_id: int) -> None:
        """The spans of this trace are exported, those to come as well."""
        with self._lock:
            self._decide(trace_id, is_kept=True)
            kept = [held.span for held in self._ring if trace_id in held.trace_ids]
            self._ring = deque(held for held in self._ring if trace_id not in held.trace_ids)
        for span in kept:
            self._export(_as_sampled(span))

    def forget(self, trace_id: int) -> None:
        """The spans of this trace are of no interest, those to come neither."""
        with self._lock:
            self._decide(trace_id, is_kept=False)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is None or context.trace_flags.sampled:
            return
        trace_ids = frozenset({context.trace_id})
        if span.parent is None and span.links:  # a step
            trace_ids = frozenset(link.context.trace_id for link in span.links)
        with self._lock:
            verdicts = {self._verdicts.get(trace_id) for trace_id in trace_ids}
            is_kept = True in verdicts
            if not is_kept and None in verdicts:
                self._hold(_Held(time.monotonic(), span, trace_ids))
        if is_kept:
            self._export(_as_sampled(span))

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True  # what is held waits for nobody

    def _hold(self, held: _Held) -> None:
        self._ring.append(held)
        while self._ring and (
            len(self._ring) > _MAX_SPANS or held.ended - self._ring[0].ended > _HOLD_SECONDS
        ):
            self._ring.popleft()

    def _decide(self, trace_id: int, *, is_kept: bool) -> None:
        self._verdicts[trace_id] = is_kept
        self._verdicts.move_to_end(trace_id)
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)


def _as_sampled(span: ReadableSpan) -> ReadableSpan:
    """The same, as exporters take it."""
    context = span.context
    if context is None:
        raise ValueError("a span that has ended has a context")
    sampled = SpanContext(
        context.trace_id,
        context.span_id,
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
        trace_state=context.trace_state,
    )
    return ReadableSpan(
        name=span.name,
        context=sampled,
        parent=span.parent,
        resource=span.resource,
        attributes=span.attributes,
        events=span.events,
        links=span.links,
        kind=span.kind,
        status=span.status,
        start_time=span.start_time,
        end_time=span.end_time,
        instrumentation_scope=span.instrumentation_scope,
    )
