"""Spans of one Generate call: its SERVER span, and what the core's stamps say of each sample.

    SERVER  firsttoken.v1.Engine/Generate
    ├── grammar_compile   arrival to grammar ready
    ├── queue             to the first step
    ├── prefill           to the first token, an event per chunk
    └── decode            to the end

The children are made when the sample has ended, with the stamps of the core; the call may be over
by then (an abort is acknowledged later). Unsampled calls cost one check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from engine_service.errors import EngineError, InternalError
from engine_service.grpc_status import CODES, code_name
from engine_service.messages import AddRequest, Finish, FinishReason, RequestTiming
from traces import names, propagation
from traces.clock import unix_ns

_SERVICE: Final = "firsttoken.v1.Engine"
_METHOD: Final = "Generate"


class GenerateSpan:
    def __init__(self, span: Span) -> None:
        self._span = span
        self._recording = span.is_recording()
        self._tracer = trace.get_tracer("firsttoken.engine")

    def admitted(self, request: AddRequest, model_name: str) -> None:
        if not self._recording:
            return
        self._span.set_attributes(
            {
                names.REQUEST_ID: request.request_id,
                names.PROMPT_TOKENS: len(request.prompt_token_ids),
                names.GEN_AI_REQUEST_MODEL: model_name,
                names.GEN_AI_REQUEST_MAX_TOKENS: request.stopping.max_tokens,
                names.GEN_AI_REQUEST_TEMPERATURE: request.sampling.temperature,
                names.GEN_AI_REQUEST_CHOICE_COUNT: request.n,
            }
        )

    def answered(self, num_output_tokens: int) -> None:
        self._span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, num_output_tokens)

    def sample_finished(self, index: int, finish: Finish) -> None:
        if not self._recording:
            return
        status = _status_of(finish)
        for name, start_ns, end_ns in _stages(finish.timing):
            child = self._tracer.start_span(
                name,
                context=trace.set_span_in_context(self._span),
                start_time=unix_ns(start_ns),
                attributes={names.SAMPLE_INDEX: index},
            )
            if name == names.SPAN_PREFILL:
                _describe_prefill(child, finish.timing)
            if end_ns == finish.timing.finished_ns:
                child.set_attribute(names.FINISH_REASON, finish.reason.name.lower())
                child.set_status(status)
            child.end(end_time=unix_ns(end_ns))


@contextmanager
def generate_span(
    metadata: Iterable[tuple[str, str | bytes]],
    time_remaining: Callable[[], float | None],
    arrival_ns: int,
) -> Iterator[GenerateSpan]:
    """The call's SERVER span, under the caller's; whatever ends the call ends it with a status."""
    span = trace.get_tracer("firsttoken.engine").start_span(
        f"{_SERVICE}/{_METHOD}",
        context=propagation.extract(metadata),
        kind=SpanKind.SERVER,
        attributes={
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: _SERVICE,
            names.RPC_METHOD: _METHOD,
        },
        start_time=unix_ns(arrival_ns),
    )
    error: EngineError | None = None
    code, description = 0, ""
    try:
        yield GenerateSpan(span)
    except asyncio.CancelledError:
        remaining = time_remaining()  # until the call's deadline, if it has one
        expired = remaining is not None and remaining <= 0
        status = grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
        code, description = status.value[0], status.name
        raise
    except Exception as raised:
        error = raised if isinstance(raised, EngineError) else InternalError("")
        code, description = CODES[error.reason], code_name(error)
        span.set_attribute(names.ERROR_TYPE, error.reason)
        raise
    finally:
        span.set_attribute(names.RPC_GRPC_STATUS_CODE, code)
        if code:
            span.set_status(Status(StatusCode.ERROR, description))
        span.end(end_time=unix_ns(time.monotonic_ns()))


def _stages(timing: RequestTiming) -> Iterator[tuple[str, int, int]]:
    """(span name, start, end) of each stage that the sample entered."""
    end_ns = timing.finished_ns
    entered_queue_ns = timing.arrival_ns
    if timing.grammar_ready_ns:
        entered_queue_ns = timing.grammar_ready_ns
        yield names.SPAN_GRAMMAR_COMPILE, timing.arrival_ns, timing.grammar_ready_ns
    yield names.SPAN_QUEUE, entered_queue_ns, timing.first_scheduled_ns or end_ns
    if timing.first_scheduled_ns:
        yield names.SPAN_PREFILL, timing.first_scheduled_ns, timing.first_token_ns or end_ns
    if timing.first_token_ns:
        yield names.SPAN_DECODE, timing.first_token_ns, end_ns


def _describe_prefill(span: Span, timing: RequestTiming) -> None:
    span.set_attributes(
        {
            names.FIRST_STEP_ID: timing.first_step_id,
            names.PREFILL_CHUNKS: len(timing.prefill_chunks),
            names.PREEMPTIONS: timing.num_preemptions,
        }
    )
    for chunk in timing.prefill_chunks:
        attributes = {
            names.STEP_ID: chunk.step_id,
            names.CHUNK_TOKENS: chunk.num_tokens,
            names.CHUNK_DURATION_US: (chunk.end_ns - chunk.start_ns) // 1_000,
        }
        span.add_event(names.EVENT_PREFILL_CHUNK, attributes, unix_ns(chunk.end_ns))
    if timing.first_token_ns:
        span.add_event(names.EVENT_FIRST_TOKEN, timestamp=unix_ns(timing.first_token_ns))


def _status_of(finish: Finish) -> Status:
    if finish.failure is not None:
        return Status(StatusCode.ERROR, finish.failure.reason)
    if finish.reason is FinishReason.ABORT:
        return Status(StatusCode.ERROR, "aborted")
    return Status(StatusCode.OK)
