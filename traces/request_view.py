"""One request as its spans tell it, from whichever processes they came: what readers start from.

    facade SERVER ── CLIENT ── engine SERVER ── admit, queue, prefill, deliver, decode
                                                       └──links──> engine.step

A trace may hold several requests, one after the other or side by side: an agent's turns. Each is a
view of its own, of the spans below its facade's SERVER span, or below its call where no facade was.

A request may have gone through several attempts, engines and samples. What counts is the way that
the first token took: the call whose token was the first to be received, or written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from traces import names
from traces.stored_spans import StoredEvent, StoredSpan

_CORE_DIED: Final = "ENGINE_UNAVAILABLE"  # the error's type
_ATTEMPT: Final = re.compile(r"-r\d+$")  # of a later attempt's request id


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
    spans: list[StoredSpan]  # of the request, by start
    facade: StoredSpan | None  # None: the engine was called directly
    facade_stages: dict[str, StoredSpan]
    call: EngineCall | None  # the one that made the first token; else the last one
    first_client: StoredSpan | None  # the first attempt at that call
    client: StoredSpan | None  # its last attempt: `call`, if that is there, from the caller's side

    @property
    def root(self) -> StoredSpan:
        """What the request's time counts from."""
        if self.facade is not None:
            return self.facade
        if self.call is None:
            return self.spans[0]
        return self.first_client or self.call.server

    @property
    def request_id(self) -> str:
        """As the caller knows it; of a call without a facade, as the engine does."""
        known = self.call.request_id if self.call is not None else ""
        return text_of(self.root, names.REQUEST_ID) or known

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


# ---------------------------------------------------------------- joining


def join(
    spans: Iterable[StoredSpan], *, trace_ids: Sequence[str] | None = None
) -> list[RequestView]:
    """By start. `trace_ids`: of these only."""
    traces: dict[str, list[StoredSpan]] = {}
    steps: dict[tuple[str, str], Step] = {}
    for span in spans:
        if span["name"] == names.SPAN_STEP:
            steps[span["trace_id"], span["span_id"]] = _step(span)
        elif trace_ids is None or span["trace_id"] in trace_ids:
            traces.setdefault(span["trace_id"], []).append(span)
    views = [_view(request, steps) for trace in traces.values() for request in _requests_of(trace)]
    with_calls = [view for view in views if view.facade is not None or view.call is not None]
    return sorted(with_calls, key=lambda view: view.root["start_unix_ns"])


def _requests_of(trace: list[StoredSpan]) -> list[list[StoredSpan]]:
    """The spans of each of the trace's requests, by start; what belongs to none is left out."""
    trace.sort(key=lambda span: span["start_unix_ns"])
    by_id = {span["span_id"]: span for span in trace}
    facades = [span["span_id"] for span in trace if _is_generation(span)]
    requests: dict[str, list[StoredSpan]] = {}
    for span in trace:
        request = _request_of(span, by_id)
        if request not in facades and len(facades) == 1:
            request = facades[0]  # between the two is a span that is not in the store
        if request is not None:
            requests.setdefault(request, []).append(span)
    return list(requests.values())


def _request_of(span: StoredSpan, by_id: Mapping[str, StoredSpan]) -> str | None:
    """What is one for all spans of a request: its facade's span id, or the request id of a call
    without a facade, whose attempts are calls of their own."""
    request: str | None = None
    above: StoredSpan | None = span
    while above is not None:
        if _is_generation(above):
            return above["span_id"]
        if _is_call(above):
            request = _first_request_id(above) or above["span_id"]
        above = by_id.get(above["parent_span_id"])
    return request


def _view(spans: list[StoredSpan], steps: Mapping[tuple[str, str], Step]) -> RequestView:
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
    call = min(calls, key=_first_of_calls) if calls else None
    attempts = _attempts(spans, call)
    last = attempts[-1] if attempts else None
    return RequestView(
        trace_id=spans[0]["trace_id"],
        spans=spans,
        facade=facade,
        facade_stages={
            span["name"]: span
            for span in children.get(facade["span_id"] if facade else "", [])
            if span["kind"] == "INTERNAL"
        },
        call=call,
        first_client=attempts[0] if attempts else None,
        client=last if call is None else call.client,
    )


def _attempts(spans: Sequence[StoredSpan], call: EngineCall | None) -> list[StoredSpan]:
    """At `call`, by start; where no engine's span is there, at the call whose token was the first.
    Siblings, of other prompts, are no attempts at it."""
    clients = [span for span in spans if span["kind"] == "CLIENT" and _is_call(span)]
    furthest = call.client if call is not None else min(clients, key=_received_ns, default=None)
    if furthest is None:
        return []
    request_id = _first_request_id(furthest)
    return [span for span in clients if _first_request_id(span) == request_id]


def _received_ns(client: StoredSpan) -> tuple[bool, int]:
    """Those that received no token come last."""
    received = event_ns(client, names.EVENT_FIRST_TOKEN_RECEIVED)
    return received is None, received or client["start_unix_ns"]


def _first_request_id(call: StoredSpan) -> str:
    """Of the first attempt at it."""
    return _ATTEMPT.sub("", text_of(call, names.REQUEST_ID))


def _call(
    server: StoredSpan,
    parent: StoredSpan | None,
    children: Sequence[StoredSpan],
    steps: Mapping[tuple[str, str], Step],
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


def _linked(span: StoredSpan | None, steps: Mapping[tuple[str, str], Step]) -> list[Step]:
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


def is_lost(call: EngineCall) -> bool:
    """The engine's core died with it: what that knew of its stages was never told."""
    error = text_of(call.server, names.ERROR_TYPE)
    return error == _CORE_DIED and names.SPAN_QUEUE not in call.stages


def beginnings_of(view: RequestView) -> list[str]:
    """What requests with a prefix in common have in common, the shortest prefix first: hashes of
    their first tokens; at last that of a chat's first message."""
    hashes = _texts(view.call.server, names.PREFIX_HASHES) if view.call else []
    render = view.facade_stages.get(names.SPAN_RENDER)
    message = text_of(render, names.FIRST_MESSAGE) if render else ""
    return [*hashes, message] if message else hashes


def is_engine_call(span: StoredSpan) -> bool:
    return span["kind"] == "SERVER" and _is_call(span)


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


def _is_call(span: StoredSpan) -> bool:
    """Of an engine, on either side."""
    return text_of(span, names.RPC_METHOD) == "Generate"


def _texts(span: StoredSpan, name: str) -> list[str]:
    value = span["attributes"].get(name)
    return [str(item) for item in value] if isinstance(value, list) else []


def _numbers(span: StoredSpan, name: str) -> list[int]:
    value = span["attributes"].get(name)
    return [int(item) for item in value] if isinstance(value, list) else []
