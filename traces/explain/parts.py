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
from typing import NamedTuple

from traces import names
from traces.request_view import (
    EngineCall,
    RequestView,
    event_ns,
    events_of,
    is_lost,
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
        _part(raw, origin_ns, end_ns)
        for raw in _raw_parts(view)
        if raw.start < raw.end and raw.start < end_ns
    ]
    return sorted(parts, key=lambda part: (part.start_ns, part.end_ns))


class _Raw(NamedTuple):
    name: str
    start: int  # unix nanoseconds
    end: int
    seconds: float | None = None  # where they are not all of it
    detail: str = ""


def _part(raw: _Raw, origin_ns: int, end_ns: int) -> Part:
    """What lies behind the end is cut off: a step may outlive its request."""
    seconds = (raw.end - raw.start) * 1e-9 if raw.seconds is None else raw.seconds
    end = min(raw.end, end_ns)
    seconds *= (end - raw.start) / (raw.end - raw.start)
    return Part(raw.name, raw.start - origin_ns, end - origin_ns, seconds, raw.detail)


def _raw_parts(view: RequestView) -> Iterator[_Raw]:
    if view.facade is not None:
        yield from _before_the_call(view, view.facade)
    if view.first_client is not None and view.client is not None:
        # attempts at this call that were refused or lost, and the pauses between
        first_ns, last_ns = view.first_client["start_unix_ns"], view.client["start_unix_ns"]
        yield _Raw("retries", first_ns, last_ns, detail="earlier attempts")
    received = _received(view)
    if view.call is not None:
        yield from _the_call(view.call, received)
    elif view.client is not None:
        end_ns = view.client["end_unix_ns"] if received is None else received
        yield _Raw("engine", view.client["start_unix_ns"], end_ns, detail="and the way to it")
    if view.facade is not None and received is not None:
        yield from _after_the_call(view, view.facade, received)


def _received(view: RequestView) -> int | None:
    """When the first token came from the engine."""
    if view.call is not None:
        return received_ns(view.call)
    return None if view.client is None else event_ns(view.client, names.EVENT_FIRST_TOKEN_RECEIVED)


def _the_call(call: EngineCall, received: int | None) -> Iterator[_Raw]:
    shift_ns = 0
    if call.client is not None:
        shift_ns, out_ns, back_ns = _network(call)
        start_ns = call.client["start_unix_ns"]
        yield _Raw("network", start_ns, start_ns + out_ns, detail="to the engine")
        if received is None:  # a refusal, or an end that the engine told
            back = call.server["end_unix_ns"] + shift_ns, call.client["end_unix_ns"]
        else:
            back = received - back_ns, received
        yield _Raw("network", *back, detail="from the engine")
    for raw in _engine_parts(call):
        yield raw._replace(start=raw.start + shift_ns, end=raw.end + shift_ns)


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
            yield _Raw(name, start, span["end_unix_ns"])
    prepared = event_ns(facade, names.EVENT_PREPARED)
    if view.first_client is not None and prepared is not None:
        yield _Raw("open_call", prepared, view.first_client["start_unix_ns"])


def _after_the_call(view: RequestView, facade: StoredSpan, received: int) -> Iterator[_Raw]:
    write = view.facade_stages.get(names.SPAN_FIRST_WRITE)
    if write is not None:
        yield _Raw("first_text", received, write["start_unix_ns"])
        yield _Raw("first_write", write["start_unix_ns"], write["end_unix_ns"])
    elif (text_ns := event_ns(facade, names.EVENT_FIRST_TEXT)) is not None:
        yield _Raw("first_text", received, text_ns)


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
        if client_start <= server_start <= call.client["end_unix_ns"]:
            return 0, server_start - client_start, 0
        return client_start - server_start, 0, 0
    out, back = server_start - client_start, received - _written(deliver, received)
    if out >= 0 and back >= 0:
        return 0, out, back
    half = max(out + back, 0) // 2
    return client_start + half - server_start, half, half


# ---------------------------------------------------------------- the engine


def _engine_parts(call: EngineCall) -> Iterator[_Raw]:
    server = call.server
    admit, deliver = call.stages.get(names.SPAN_ADMIT), call.stages.get(names.SPAN_DELIVER)
    if admit is None and text_of(server, names.ERROR_TYPE):
        yield _Raw("admit", server["start_unix_ns"], server["end_unix_ns"], detail="refused")
    elif admit is not None and is_lost(call):
        end = server["end_unix_ns"] if deliver is None else deliver["start_unix_ns"]
        yield _Raw("lost", admit["end_unix_ns"], end, detail="in the core, which died")
    for name in (names.SPAN_ADMIT, names.SPAN_QUEUE, names.SPAN_PREFILL, names.SPAN_DELIVER):
        span = call.stages.get(name)
        if span is None:
            continue
        if name == names.SPAN_ADMIT:
            yield _Raw("admit", span["start_unix_ns"], span["end_unix_ns"])
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
            yield _Raw("between_steps", cursor, start)
        if event["name"] == names.EVENT_WAIT:
            cursor = start + number_of(event, names.WAIT_DURATION_US) * _US
            yield _Raw(WAIT_PREFIX + text_of(event, names.WAIT_REASON), start, cursor)
        else:
            cursor = event["unix_ns"]
            yield from _chunk(event)
    end = span["end_unix_ns"]
    if span["name"] == names.SPAN_PREFILL and not events_of(span, names.EVENT_FIRST_TOKEN):
        yield _Raw("abandoned", cursor, end, detail="a step that was under way when it ended")


def _chunk(event: StoredEvent) -> Iterator[_Raw]:
    end = event["unix_ns"]
    start = end - number_of(event, names.CHUNK_DURATION_US) * _US
    yield _Raw("schedule", start - number_of(event, names.CHUNK_SCHEDULE_US) * _US, start)
    tokens = number_of(event, names.CHUNK_TOKENS)
    step_tokens = max(number_of(event, names.CHUNK_STEP_TOKENS), tokens, 1)
    own_seconds = (end - start) * 1e-9 * tokens / step_tokens
    step = f"step {number_of(event, names.STEP_ID)}"
    yield _Raw("prefill", start, end, own_seconds, f"{step}: {tokens} of {step_tokens} tokens")
    if step_tokens > tokens:
        others_seconds = (end - start) * 1e-9 - own_seconds
        detail = f"{step}: {step_tokens - tokens} tokens of others"
        yield _Raw("prefill_others", start, end, others_seconds, detail)


def _start_of(event: StoredEvent) -> int:
    if event["name"] == names.EVENT_WAIT:
        return event["unix_ns"]
    micros = number_of(event, names.CHUNK_DURATION_US) + number_of(event, names.CHUNK_SCHEDULE_US)
    return event["unix_ns"] - micros * _US


def _delivery(span: StoredSpan, end: int) -> Iterator[_Raw]:
    start = span["start_unix_ns"]
    received = event_ns(span, names.EVENT_FRAME_RECEIVED) or start
    taken = event_ns(span, names.EVENT_TOKEN_TAKEN) or received
    yield _Raw("emit", start, received, detail="the core's update, and its frame")
    yield _Raw("wake", received, taken, detail="until the stream's reader ran")
    yield _Raw("write", taken, end)
