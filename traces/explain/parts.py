"""A time to first token, cut into parts: each lies between two stamps of its own.

    facade   read_body parse plan render tokenize open_call          first_text first_write
    network                                                out  back
    engine                        admit, waits, prefill, emit, wake, write

Only the network is a difference: of what the caller waited for the engine, and what the engine had
the request. The clocks of two machines differ, so its two ways are told apart only where they agree
(the engine's time lies within its caller's); else each is taken for half of it.

A step that computed some of the prompt is divided by tokens: the share of the request's own is
`prefill`, the rest is `prefill_others`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from traces import names
from traces.request_view import (
    EngineCall,
    RequestView,
    event_ns,
    events_of,
    number_of,
    received_ns,
    text_of,
)
from traces.stored_spans import StoredEvent, StoredSpan

WAIT_PREFIX = "wait_"  # then the reason
_US = 1_000


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    start_ns: int  # since the request began
    end_ns: int
    seconds: float  # at most what lies between; parts that share a step have some of it each
    detail: str = ""


def parts_of(view: RequestView) -> list[Part]:
    """In order, up to the first token; or to the end, if there was none."""
    origin_ns = view.root["start_unix_ns"]
    end_ns = view.first_token_unix_ns or view.root["end_unix_ns"]
    parts = [
        Part(
            name,
            start - origin_ns,
            end - origin_ns,
            (end - start) * 1e-9 if seconds is None else seconds,
            detail,
        )
        for name, start, end, seconds, detail in _raw_parts(view)
        if end > start and start < end_ns
    ]
    return sorted(parts, key=lambda part: (part.start_ns, part.end_ns))


# (name, start, end in unix nanoseconds, seconds where they are not all of it, detail)
_Raw = tuple[str, int, int, float | None, str]


def _raw_parts(view: RequestView) -> Iterator[_Raw]:
    if view.facade is not None:
        yield from _before_the_call(view, view.facade)
    call = view.call
    if call is None:
        return
    shift_ns = 0
    received = received_ns(call)
    if call.client is not None:
        shift_ns, out_ns, back_ns = _network(call)
        start_ns = call.client["start_unix_ns"]
        yield "network", start_ns, start_ns + out_ns, None, "to the engine"
        if received is not None:
            yield "network", received - back_ns, received, None, "from the engine"
    for name, start, end, seconds, detail in _engine_parts(call):
        yield name, start + shift_ns, end + shift_ns, seconds, detail
    if view.facade is not None and received is not None:
        yield from _after_the_call(view, view.facade, received)


# ---------------------------------------------------------------- the facade


def _before_the_call(view: RequestView, facade: StoredSpan) -> Iterator[_Raw]:
    for name in (
        names.SPAN_READ_BODY,
        names.SPAN_PARSE,
        names.SPAN_PLAN,
        names.SPAN_RENDER,
        names.SPAN_TOKENIZE,
    ):
        if (span := view.facade_stages.get(name)) is not None:
            start = span["start_unix_ns"]
            if name == names.SPAN_PLAN and names.SPAN_PARSE in view.facade_stages:
                start = view.facade_stages[names.SPAN_PARSE]["end_unix_ns"]  # the model is found
            yield name, start, span["end_unix_ns"], None, ""
    prepared = event_ns(facade, names.EVENT_PREPARED)
    if view.first_client is None or prepared is None:
        return
    first_ns = view.first_client["start_unix_ns"]
    yield "open_call", prepared, first_ns, None, ""
    if view.call is not None and view.call.client is not None:
        # attempts that were refused or lost, and the pauses between
        yield "retries", first_ns, view.call.client["start_unix_ns"], None, "earlier attempts"


def _after_the_call(view: RequestView, facade: StoredSpan, received: int) -> Iterator[_Raw]:
    write = view.facade_stages.get(names.SPAN_FIRST_WRITE)
    if write is not None:
        yield "first_text", received, write["start_unix_ns"], None, ""
        yield "first_write", write["start_unix_ns"], write["end_unix_ns"], None, ""
    elif (text_ns := event_ns(facade, names.EVENT_FIRST_TEXT)) is not None:
        yield "first_text", received, text_ns, None, ""


# ---------------------------------------------------------------- the network


def _network(call: EngineCall) -> tuple[int, int, int]:
    """Nanoseconds: by how much the engine's stamps are shifted, and the ways out and back."""
    if call.client is None:
        return 0, 0, 0
    client_start = call.client["start_unix_ns"]
    server_start = call.server["start_unix_ns"]
    deliver = call.stages.get(names.SPAN_DELIVER)
    received = received_ns(call)
    if deliver is None or received is None:
        return 0, max(server_start - client_start, 0), 0
    out, back = server_start - client_start, received - _written(deliver, received)
    if out >= 0 and back >= 0:
        return 0, out, back
    half = max(out + back, 0) // 2
    return client_start + half - server_start, half, half


# ---------------------------------------------------------------- the engine


def _engine_parts(call: EngineCall) -> Iterator[_Raw]:
    for name in (names.SPAN_ADMIT, names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DELIVER):
        span = call.stages.get(name)
        if span is None:
            continue
        if name == names.SPAN_ADMIT:
            yield "admit", span["start_unix_ns"], span["end_unix_ns"], None, ""
        elif name == names.SPAN_DELIVER:
            yield from _delivery(span, _written(span, received_ns(call)))
        else:
            yield from _computing(span)


def _written(deliver: StoredSpan, received: int | None) -> int:
    """When the token was out. It may be with the caller before the call that wrote it returns."""
    end = deliver["end_unix_ns"]
    taken = event_ns(deliver, names.EVENT_TOKEN_TAKEN) or end
    return received if received is not None and taken <= received < end else end


def _computing(span: StoredSpan) -> Iterator[_Raw]:
    """Waits and chunks; between a chunk and what follows it the core books and schedules."""
    events = events_of(span, names.EVENT_WAIT) + events_of(span, names.EVENT_PREFILL_CHUNK)
    cursor = span["start_unix_ns"]
    for event in sorted(events, key=_start_of):
        start = _start_of(event)
        if start > cursor and span["name"] == names.SPAN_PREFILL:
            yield "between_steps", cursor, start, None, ""
        if event["name"] == names.EVENT_WAIT:
            cursor = start + number_of(event, names.WAIT_DURATION_US) * _US
            yield WAIT_PREFIX + text_of(event, names.WAIT_REASON), start, cursor, None, ""
        else:
            cursor = event["unix_ns"]
            yield from _chunk(event)
    end = span["end_unix_ns"]
    if span["name"] == names.SPAN_PREFILL and not events_of(span, names.EVENT_FIRST_TOKEN):
        yield "abandoned", cursor, end, None, "a step that was under way when it ended"


def _chunk(event: StoredEvent) -> Iterator[_Raw]:
    end = event["unix_ns"]
    start = end - number_of(event, names.CHUNK_DURATION_US) * _US
    yield "schedule", start - number_of(event, names.CHUNK_SCHEDULE_US) * _US, start, None, ""
    tokens = number_of(event, names.CHUNK_TOKENS)
    step_tokens = max(number_of(event, names.CHUNK_STEP_TOKENS), tokens, 1)
    own_seconds = (end - start) * 1e-9 * tokens / step_tokens
    step = f"step {number_of(event, names.STEP_ID)}"
    yield "prefill", start, end, own_seconds, f"{step}: {tokens} of {step_tokens} tokens"
    if step_tokens > tokens:
        others_seconds = (end - start) * 1e-9 - own_seconds
        detail = f"{step}: {step_tokens - tokens} tokens of others"
        yield "prefill_others", start, end, others_seconds, detail


def _start_of(event: StoredEvent) -> int:
    if event["name"] == names.EVENT_WAIT:
        return event["unix_ns"]
    micros = number_of(event, names.CHUNK_DURATION_US) + number_of(event, names.CHUNK_SCHEDULE_US)
    return event["unix_ns"] - micros * _US


def _delivery(span: StoredSpan, end: int) -> Iterator[_Raw]:
    start = span["start_unix_ns"]
    received = event_ns(span, names.EVENT_FRAME_RECEIVED) or start
    taken = event_ns(span, names.EVENT_TOKEN_TAKEN) or received
    yield "emit", start, received, None, "the core's update, and its frame"
    yield "wake", received, taken, None, "until the stream's reader ran"
    yield "write", taken, end, None, ""
