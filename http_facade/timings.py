"""Where an answer's time went, for its caller: the field `timings`, and the header Server-Timing.

    arrival ── prepare ── engine: queue, grammar_wait, prefill ── first content ── ... ── end
    |<------------------------- ttft ----------------------->|
    |<---------------------------------- total ------------------------------------------->|

With several choices the engine's part is that of the one whose first token came first.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import Struct
from opentelemetry.trace import Span, format_trace_id

from clients.types import Timing
from http_facade.state import RequestState

SERVER_TIMING: Final = "Server-Timing"


class WaitBody(Struct, frozen=True):
    reason: str
    ms: float


class TimingsBody(Struct, frozen=True):
    """Milliseconds; null: not known, or not come to."""

    total_ms: float
    ttft_ms: float | None  # to the first content; without a stream it is written with the rest
    prepare_ms: float | None  # arrival to the prompt's tokens
    queue_ms: float | None = None  # the engine's, as the next ones; the grammar left out
    grammar_wait_ms: float | None = None
    prefill_ms: float | None = None
    engine_first_token_ms: float | None = None  # arrival at the engine to the first token
    prefill_chunks: int | None = None
    cached_tokens: int | None = None
    preemptions: int | None = None
    waits: list[WaitBody] = []  # why it waited for its first token, in order
    trace_id: str | None = None  # for `firsttoken ttft`


def timings_body(state: RequestState, span: Span, timings: Iterable[Timing]) -> TimingsBody:
    """`timings`: of the samples that told it."""
    context = span.get_span_context()
    total_ms = _ms(state.elapsed_seconds())
    ttft_ms = _ms(state.first_content_seconds)
    prepare_ms = _ms(state.prepared_seconds)
    trace_id = format_trace_id(context.trace_id) if context.is_valid else None
    first = min(timings, key=lambda timing: timing.first_token_seconds, default=None)
    if first is None:
        return TimingsBody(total_ms or 0.0, ttft_ms, prepare_ms, trace_id=trace_id)
    return TimingsBody(
        total_ms=total_ms or 0.0,
        ttft_ms=ttft_ms,
        prepare_ms=prepare_ms,
        queue_ms=_ms(first.queue_seconds),
        grammar_wait_ms=_ms(first.grammar_wait_seconds),
        prefill_ms=_ms(first.prefill_seconds),
        engine_first_token_ms=_ms(first.first_token_seconds),
        prefill_chunks=first.prefill_chunks,
        cached_tokens=first.cached_tokens,
        preemptions=first.preemptions,
        waits=[WaitBody(wait.reason, round(wait.seconds * 1000, 3)) for wait in first.waits],
        trace_id=trace_id,
    )


def server_timing(body: TimingsBody) -> str:
    """The header's value; what is not known is left out."""
    metrics = {
        "prepare": body.prepare_ms,
        "queue": body.queue_ms,
        "grammar": body.grammar_wait_ms,
        "prefill": body.prefill_ms,
        "ttft": body.ttft_ms,
        "total": body.total_ms,
    }
    return ", ".join(f"{name};dur={ms:g}" for name, ms in metrics.items() if ms is not None)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
