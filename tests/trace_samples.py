"""Spans of the local trace store, made by hand."""

from __future__ import annotations

import itertools

from traces import names
from traces.stored_spans import AttributeValue, StoredEvent, StoredLink, StoredSpan

MS = 1_000_000
_ids = itertools.count(1)


def span(
    trace_id: str,
    name: str,
    start_ms: float,
    end_ms: float,
    *,
    parent: str = "",
    kind: str = "INTERNAL",
    attributes: dict[str, AttributeValue] | None = None,
    events: list[StoredEvent] | None = None,
    links: list[StoredLink] | None = None,
) -> StoredSpan:
    return StoredSpan(
        trace_id=trace_id,
        span_id=f"{next(_ids):016x}",
        parent_span_id=parent,
        name=name,
        kind=kind,
        start_unix_ns=round(start_ms * MS),
        end_unix_ns=round(end_ms * MS),
        attributes=attributes or {},
        events=events or [],
        links=links or [],
        status={"code": "UNSET", "message": ""},
        service="",
        pid=1,
    )


def event(name: str, at_ms: float, **attributes: AttributeValue) -> StoredEvent:
    return StoredEvent(name=name, unix_ns=round(at_ms * MS), attributes=attributes)


def wait(reason: str, start_ms: float, end_ms: float) -> StoredEvent:
    duration_us = round((end_ms - start_ms) * 1000)
    return StoredEvent(
        name=names.EVENT_WAIT,
        unix_ns=round(start_ms * MS),
        attributes={names.WAIT_REASON: reason, names.WAIT_DURATION_US: duration_us},
    )


def chunk(step_id: int, start_ms: float, end_ms: float, tokens: int, of: int) -> StoredEvent:
    return StoredEvent(
        name=names.EVENT_PREFILL_CHUNK,
        unix_ns=round(end_ms * MS),
        attributes={
            names.STEP_ID: step_id,
            names.CHUNK_TOKENS: tokens,
            names.CHUNK_STEP_TOKENS: of,
            names.CHUNK_SCHEDULE_US: 0,
            names.CHUNK_DURATION_US: round((end_ms - start_ms) * 1000),
        },
    )


def request(
    trace_id: str,
    *,
    at_ms: float = 0.0,
    reason: str = "no_blocks",
    waits_ms: float = 60.0,
    engine_clock_ms: float = 0.0,
    hashes: list[str] | None = None,
    salt: str = "s",
    cached_tokens: int = 0,
) -> list[StoredSpan]:
    """Arrives, 10 ms in the facade, 2 out, 1 admitted, waits, 20 in its only step, 3 back, 4 to
    write; half of the step is another's."""
    start = at_ms
    facade = span(
        trace_id,
        "POST /v1/completions",
        start,
        start + 200 + waits_ms,
        kind="SERVER",
        attributes={names.GEN_AI_OPERATION_NAME: "text_completion"},
    )
    inside = facade["span_id"]
    read = span(trace_id, names.SPAN_READ_BODY, start, start + 4, parent=inside)
    tokenize = span(trace_id, names.SPAN_TOKENIZE, start + 4, start + 10, parent=inside)
    sent = start + 10
    received = sent + 2 + 1 + waits_ms + 20 + 3
    client = span(
        trace_id,
        "firsttoken.v1.Engine/Generate",
        sent,
        received + 100,
        kind="CLIENT",
        attributes={names.RPC_METHOD: "Generate"},
        events=[event(names.EVENT_FIRST_TOKEN_RECEIVED, received)],
        parent=inside,
    )
    write = span(trace_id, names.SPAN_FIRST_WRITE, received, received + 4, parent=inside)
    facade["events"] = [
        event(names.EVENT_PREPARED, sent),
        event(names.EVENT_FIRST_BYTE_WRITTEN, received + 4),
    ]
    came = sent + 2 + engine_clock_ms
    server = span(
        trace_id,
        "firsttoken.v1.Engine/Generate",
        came,
        came + 200,
        kind="SERVER",
        parent=client["span_id"],
        attributes={
            names.RPC_METHOD: "Generate",
            names.REQUEST_ID: f"request of {trace_id}",
            names.PROMPT_TOKENS: 100,
            names.PREFIX_HASHES: hashes or [],
            names.PREFIX_SALT: salt,
        },
    )
    below = server["span_id"]
    queued, scheduled = came + 1, came + 1 + waits_ms
    step = span(
        f"step-{trace_id}",
        names.SPAN_STEP,
        scheduled,
        scheduled + 20,
        attributes={
            names.STEP_ID: 7,
            names.STEP_TOKENS: 128,
            names.STEP_SHARE_REQUESTS: [f"request of {trace_id}", "neighbour"],
            names.STEP_SHARE_TRACES: [trace_id, "n" * 32],
            names.STEP_SHARE_TOKENS: [64, 64],
            names.STEP_SHARE_PREFILL: [True, True],
        },
    )
    link = StoredLink(trace_id=step["trace_id"], span_id=step["span_id"])
    prefill = span(
        trace_id,
        names.SPAN_PREFILL,
        scheduled,
        scheduled + 20,
        attributes={names.CACHED_TOKENS: cached_tokens},
        events=[
            chunk(7, scheduled, scheduled + 20, 64, of=128),
            event(names.EVENT_FIRST_TOKEN, scheduled + 20),
        ],
        links=[link],
        parent=below,
    )
    step["links"].append(StoredLink(trace_id=trace_id, span_id=prefill["span_id"]))
    return [
        facade,
        read,
        tokenize,
        client,
        write,
        server,
        step,
        span(trace_id, names.SPAN_ADMIT, came, queued, parent=below),
        span(
            trace_id,
            names.SPAN_QUEUE,
            queued,
            scheduled,
            events=[wait(reason, queued, scheduled)],
            parent=below,
        ),
        prefill,
        span(trace_id, names.SPAN_DELIVER, scheduled + 20, scheduled + 20, parent=below),
    ]


A, B, C = (digit * 32 for digit in "abc")
