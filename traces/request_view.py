"""One request as its spans tell it, from whichever processes they came: what readers start from.

    facade SERVER ── CLIENT ── engine SERVER ── admit, queue, prefill, deliver, decode
                                                       └──links──> engine.step

A trace may have gone through several attempts, engines and samples. What counts is the way that
the first token took: the call whose token was the first to be received, or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from traces import names
from traces.stored_spans import StoredEvent, StoredSpan, read_spans

_MAX_ALIKE: Final = 100  # earlier requests that are read for one


@dataclass(frozen=True, slots=True)
class StepShare:
    """What one sample had of a step."""

    request_id: str
    trace_id: str  # empty: not traced
    num_tokens: int
    is_prefill: bool


@dataclass(frozen=True, slots=True)
class Step:
    """An `engine.step` span that the request waited for, or was computed in."""

    step_id: int
    start_unix_ns: int
    end_unix_ns: int
    num_tokens: int
    budget_tokens: int
    num_requests: int
    num_free_blocks: int
    shares: tuple[StepShare, ...]  # the largest


@dataclass(slots=True)
class EngineCall:
    """One attempt at one engine."""

    server: StoredSpan
    client: StoredSpan | None = None  # of the process that called it, where that is traced
    stages: dict[str, StoredSpan] = field(default_factory=dict)  # of the first sample to begin
    queue_steps: list[Step] = field(default_factory=list)
    prefill_steps: list[Step] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return text_of(self.server, names.REQUEST_ID)


@dataclass(slots=True)
class RequestView:
    trace_id: str
    spans: list[StoredSpan]  # of the trace, by start
    facade: StoredSpan | None  # None: the engine was called directly
    facade_stages: dict[str, StoredSpan]
    first_client: StoredSpan | None  # of all attempts
    call: EngineCall | None  # the one that made the first token; else the last one

    @property
    def root(self) -> StoredSpan:
        """What the request's time counts from."""
        if self.facade is not None:
            return self.facade
        if self.call is None:
            return self.spans[0]
        return self.call.client or self.call.server

    @property
    def first_token_unix_ns(self) -> int | None:
        """Where the time to the first token ends: the first content was written, or, in an answer
        that is not streamed, was there; without a facade the caller had the token. None: there was
        no first token."""
        if self.facade is not None:
            return event_ns(self.facade, names.EVENT_FIRST_BYTE_WRITTEN) or event_ns(
                self.facade, names.EVENT_FIRST_TEXT
            )
        return None if self.call is None else received_ns(self.call)

    @property
    def ttft_seconds(self) -> float | None:
        end = self.first_token_unix_ns
        return None if end is None else (end - self.root["start_unix_ns"]) * 1e-9


# ---------------------------------------------------------------- reading


def read_request(directory: Path, trace_id: str) -> RequestView | None:
    """None: the store has nothing of it."""
    views = join(read_spans(directory, mentioning=[trace_id]), trace_ids=[trace_id])
    return views[0] if views else None


def read_alike(directory: Path, view: RequestView) -> list[RequestView]:
    """The latest that began before it and begin like it: equal first tokens, or an equal first
    message."""
    began = view.root["start_unix_ns"]
    hashes = _texts(view.call.server, names.PREFIX_HASHES)[:1] if view.call else []
    render = view.facade_stages.get(names.SPAN_RENDER)
    message = text_of(render, names.FIRST_MESSAGE) if render else ""
    texts = [text for text in (*hashes, message) if text]
    if not texts:
        return []
    alike = {
        span["trace_id"]: span["start_unix_ns"]
        for span in read_spans(directory, mentioning=texts)
        if span["start_unix_ns"] < began and span["trace_id"] != view.trace_id
    }
    latest = sorted(alike, key=lambda trace_id: -alike[trace_id])[:_MAX_ALIKE]
    return join(read_spans(directory, of_traces=latest)) if latest else []


def read_requests(directory: Path, *, since_unix_ns: int = 0) -> list[RequestView]:
    """All that the store knows of, by start; those that began before `since_unix_ns` left out."""
    views = join(read_spans(directory, since_unix_ns=since_unix_ns))
    return [view for view in views if view.root["start_unix_ns"] >= since_unix_ns]


def join(
    spans: Iterable[StoredSpan], *, trace_ids: Sequence[str] | None = None
) -> list[RequestView]:
    """`trace_ids`: of these only."""
    traces: dict[str, list[StoredSpan]] = {}
    steps: dict[tuple[str, str], Step] = {}
    for span in spans:
        if span["name"] == names.SPAN_STEP:
            steps[span["trace_id"], span["span_id"]] = _step(span)
        elif trace_ids is None or span["trace_id"] in trace_ids:
            traces.setdefault(span["trace_id"], []).append(span)
    views = [_view(trace_id, trace, steps) for trace_id, trace in traces.items()]
    with_calls = [view for view in views if view.facade is not None or view.call is not None]
    return sorted(with_calls, key=lambda view: view.root["start_unix_ns"])


def _view(
    trace_id: str, spans: list[StoredSpan], steps: dict[tuple[str, str], Step]
) -> RequestView:
    spans.sort(key=lambda span: span["start_unix_ns"])
    children: dict[str, list[StoredSpan]] = {}
    for span in spans:
        children.setdefault(span["parent_span_id"], []).append(span)
    by_id = {span["span_id"]: span for span in spans}
    facade = next((span for span in spans if _is_generation(span)), None)
    calls = [
        _call(span, by_id.get(span["parent_span_id"]), children.get(span["span_id"], []), steps)
        for span in spans
        if is_engine_call(span)
    ]
    clients = [span for span in spans if span["kind"] == "CLIENT" and _method(span) == "Generate"]
    return RequestView(
        trace_id=trace_id,
        spans=spans,
        facade=facade,
        facade_stages={
            span["name"]: span
            for span in children.get(facade["span_id"] if facade else "", [])
            if span["kind"] == "INTERNAL"
        },
        first_client=clients[0] if clients else None,
        call=min(calls, key=_first_of_calls) if calls else None,
    )


def _call(
    server: StoredSpan,
    parent: StoredSpan | None,
    children: Sequence[StoredSpan],
    steps: dict[tuple[str, str], Step],
) -> EngineCall:
    call = EngineCall(server, parent if parent and parent["kind"] == "CLIENT" else None)
    delivered = [span for span in children if span["name"] == names.SPAN_DELIVER]
    first = min(delivered, key=lambda span: span["end_unix_ns"]) if delivered else None
    index = first["attributes"].get(names.SAMPLE_INDEX, 0) if first else 0
    for span in children:
        if span["attributes"].get(names.SAMPLE_INDEX, index) == index:
            call.stages.setdefault(span["name"], span)
    call.queue_steps = _linked(call.stages.get(names.SPAN_QUEUE), steps)
    call.prefill_steps = _linked(call.stages.get(names.SPAN_PREFILL), steps)
    return call


def _first_of_calls(call: EngineCall) -> tuple[bool, int]:
    """Those that made a token before those that did not; the latest of the latter."""
    received = received_ns(call)
    return (False, received) if received else (True, -call.server["start_unix_ns"])


def _linked(span: StoredSpan | None, steps: dict[tuple[str, str], Step]) -> list[Step]:
    links = span["links"] if span else []
    found = [steps.get((link["trace_id"], link["span_id"])) for link in links]
    return sorted(filter(None, found), key=lambda step: step.start_unix_ns)


def _step(span: StoredSpan) -> Step:
    shares = zip(
        _texts(span, names.STEP_SHARE_REQUESTS),
        _texts(span, names.STEP_SHARE_TRACES),
        _numbers(span, names.STEP_SHARE_TOKENS),
        _numbers(span, names.STEP_SHARE_PREFILL),
        strict=False,
    )
    return Step(
        step_id=number_of(span, names.STEP_ID),
        start_unix_ns=span["start_unix_ns"],
        end_unix_ns=span["end_unix_ns"],
        num_tokens=number_of(span, names.STEP_TOKENS),
        budget_tokens=number_of(span, names.STEP_BUDGET_TOKENS),
        num_requests=number_of(span, names.STEP_REQUESTS),
        num_free_blocks=number_of(span, names.STEP_FREE_BLOCKS),
        shares=tuple(
            StepShare(request_id, trace_id, tokens, bool(is_prefill))
            for request_id, trace_id, tokens, is_prefill in shares
        ),
    )


# ---------------------------------------------------------------- what a span says


def received_ns(call: EngineCall) -> int | None:
    """When the caller had the first token; where it tells nothing, when it was written to it."""
    if call.client is not None:
        received = event_ns(call.client, names.EVENT_FIRST_TOKEN_RECEIVED)
        if received is not None:
            return received
    deliver = call.stages.get(names.SPAN_DELIVER)
    return deliver["end_unix_ns"] if deliver else None


def is_engine_call(span: StoredSpan) -> bool:
    return span["kind"] == "SERVER" and _method(span) == "Generate"


def event_ns(span: StoredSpan, name: str) -> int | None:
    return next((event["unix_ns"] for event in events_of(span, name)), None)


def events_of(span: StoredSpan, name: str) -> list[StoredEvent]:
    return [event for event in span["events"] if event["name"] == name]


def text_of(span: StoredSpan | StoredEvent, name: str) -> str:
    """Empty: it is not there."""
    return str(span["attributes"].get(name, ""))


def number_of(span: StoredSpan | StoredEvent, name: str) -> int:
    """0: it is not there."""
    value = span["attributes"].get(name, 0)
    return int(value) if isinstance(value, int | float) else 0


def _is_generation(span: StoredSpan) -> bool:
    return span["kind"] == "SERVER" and names.GEN_AI_OPERATION_NAME in span["attributes"]


def _method(span: StoredSpan) -> str:
    return text_of(span, names.RPC_METHOD)


def _texts(span: StoredSpan, name: str) -> list[str]:
    value = span["attributes"].get(name)
    return [str(item) for item in value] if isinstance(value, list) else []


def _numbers(span: StoredSpan, name: str) -> list[int]:
    value = span["attributes"].get(name)
    return [int(item) for item in value] if isinstance(value, list) else []
