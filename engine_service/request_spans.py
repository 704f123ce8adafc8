"""Spans of one Generate call: its SERVER span, and what the core's stamps say of each sample.

    SERVER  firsttoken.v1.Engine/Generate
    ├── admit             arrival to the engine's queue: checks, tokenizing a text
    ├── queue             to the first step, an event per reason to wait
    │   └── grammar_compile
    ├── prefill           to the first token, an event per chunk, and per wait between chunks
    ├── deliver           first token computed to first token written
    └── decode            to the end

All but `admit` and `deliver` are made when the sample has ended, with the stamps of the core; the
call may be over by then (an abort is acknowledged later). Unsampled calls cost one check.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanContext, SpanKind, Status, StatusCode

from engine_service.errors import EngineError, InternalError
from engine_service.grpc_status import CODES, code_name
from engine_service.messages import AddRequest, Finish, FinishReason, RequestTiming
from engine_service.prefix_hashes import prefix_hashes, salt_hash
from engine_service.slow_traces import SlowTraces
from engine_service.stage_events import add_chunks, add_mailbox_wait, add_waits
from engine_service.step_spans import SampleSteps, StepSpans
from traces import names, propagation
from traces.clock import unix_ns
from traces.span_ids import start_chosen_span

_SERVICE: Final = "firsttoken.v1.Engine"
_METHOD: Final = "Generate"
_DEADLINE_SLACK_SECONDS: Final = 0.05  # the caller's clock starts before its call arrives here


class _FirstToken(NamedTuple):
    computed_ns: int
    received_ns: int


class GenerateSpan:
    def __init__(
        self,
        span: Span,
        arrival_ns: int,
        step_spans: StepSpans,
        slow_traces: SlowTraces | None,
    ) -> None:
        """`slow_traces`: judges the trace, which begins with this span."""
        self._span = span
        self._slow_traces = slow_traces
        self._arrival_ns = arrival_ns
        self._step_spans = step_spans
        self._tracer = trace.get_tracer("firsttoken.engine")
        self._parent = trace.set_span_in_context(span)
        self._samples: list[SampleSteps] = []
        self._first_tokens: dict[int, _FirstToken] = {}  # by sample, until it is written
        self._request_id = ""
        self._submitted_ns = 0
        self.is_recording = span.is_recording()

    def checked(self, request: AddRequest, model_name: str) -> None:
        """It is to be admitted next."""
        if not self.is_recording:
            return
        self._request_id = request.request_id
        self._submitted_ns = time.monotonic_ns()
        self._span.set_attributes(
            {
                names.REQUEST_ID: request.request_id,
                names.PROMPT_TOKENS: len(request.prompt_token_ids),
                names.GEN_AI_REQUEST_MODEL: model_name,
                names.GEN_AI_REQUEST_MAX_TOKENS: request.stopping.max_tokens,
                names.GEN_AI_REQUEST_TEMPERATURE: request.sampling.temperature,
                names.GEN_AI_REQUEST_CHOICE_COUNT: request.n,
                names.PREFIX_HASHES: prefix_hashes(request.prompt_token_ids),
                names.PREFIX_SALT: salt_hash(request.cache_salt),
            }
        )
        self._child(names.SPAN_ADMIT, self._arrival_ns).end(unix_ns(self._submitted_ns))

    def admitted(self, num_samples: int) -> None:
        """It is on its way to the core, which will tell of each sample's end."""
        if not self.is_recording:
            return
        server = self._span.get_span_context()
        for index in range(num_samples):
            sample = SampleSteps.under(server, self._submitted_ns)
            self._samples.append(sample)
            self._step_spans.watch((self._request_id, index), sample)

    def answered(self, num_output_tokens: int) -> None:
        self._span.set_attribute(names.GEN_AI_USAGE_OUTPUT_TOKENS, num_output_tokens)

    # ------------------------------------------------------------ the first token's way out

    def first_token(self, index: int, computed_ns: int, received_ns: int) -> None:
        """The step that made it ended, and its frame came."""
        if self._samples:
            self._step_spans.first_token((self._request_id, index))
            self._first_tokens[index] = _FirstToken(computed_ns, received_ns)

    @property
    def awaits_write(self) -> bool:
        """A first token has come that is not written yet."""
        return bool(self._first_tokens)

    def written(self, index: int, taken_ns: int) -> None:
        """A Delta of the sample, taken by the reader then, is with gRPC now."""
        first = self._first_tokens.pop(index, None)
        if first is None:
            return
        span = self._child(names.SPAN_DELIVER, first.computed_ns)
        span.set_attribute(names.SAMPLE_INDEX, index)
        span.add_event(names.EVENT_FRAME_RECEIVED, timestamp=unix_ns(first.received_ns))
        span.add_event(names.EVENT_TOKEN_TAKEN, timestamp=unix_ns(taken_ns))
        span.end(unix_ns(time.monotonic_ns()))
        self.judge()

    def judge(self) -> None:
        """The first token is written, or the call has ended without one. Once."""
        judge, self._slow_traces = self._slow_traces, None
        if judge is not None:
            judge.judge(self._span, (time.monotonic_ns() - self._arrival_ns) * 1e-9)

    # ------------------------------------------------------------ a sample's end

    def sample_finished(self, index: int, finish: Finish) -> None:
        if not self._samples:
            return
        self._step_spans.ended((self._request_id, index))
        stages = list(self._stages(self._samples[index], finish.timing))
        for span, end_ns in stages:
            span.set_attribute(names.SAMPLE_INDEX, index)
            if span is stages[-1][0]:
                span.set_attribute(names.FINISH_REASON, finish.reason.name.lower())
                span.set_status(_status_of(finish))
            span.end(unix_ns(end_ns))

    def sample_lost(self, index: int) -> None:
        """The core died: what it knew of the sample will never be told."""
        self._step_spans.ended((self._request_id, index))

    def _stages(self, sample: SampleSteps, timing: RequestTiming) -> Iterator[tuple[Span, int]]:
        """The span and the end of each stage that the sample entered."""
        end_ns = timing.finished_ns
        queue_end_ns = timing.first_scheduled_ns or end_ns
        yield self._queue(sample, timing, queue_end_ns), queue_end_ns
        if timing.first_scheduled_ns:
            yield self._prefill(sample, timing), timing.first_token_ns or end_ns
        if timing.first_token_ns:
            decode = self._child(names.SPAN_DECODE, timing.first_token_ns)
            late = [c for c in timing.prefill_chunks if c.end_ns > timing.first_token_ns]
            add_chunks(decode, late)  # computed again after a preemption
            yield decode, end_ns

    def _queue(self, sample: SampleSteps, timing: RequestTiming, end_ns: int) -> Span:
        start_ns = min(sample.submitted_ns, end_ns)
        queue = self._chosen(sample.queue, names.SPAN_QUEUE, start_ns, sample.queue_steps)
        taken_ns = timing.taken_ns or end_ns
        add_mailbox_wait(queue, start_ns, taken_ns, for_step=sample.came_during_step)
        add_waits(queue, [wait for wait in timing.waits if wait.start_ns < end_ns])
        if timing.grammar_ready_ns:
            grammar = self._tracer.start_span(
                names.SPAN_GRAMMAR_COMPILE,
                context=trace.set_span_in_context(queue),
                start_time=unix_ns(taken_ns),
            )
            grammar.set_attribute(names.GRAMMAR_CACHED, timing.grammar_was_cached)
            grammar.end(unix_ns(timing.grammar_ready_ns))
        return queue

    def _prefill(self, sample: SampleSteps, timing: RequestTiming) -> Span:
        start_ns = timing.first_scheduled_ns
        end_ns = timing.first_token_ns or timing.finished_ns
        span = self._chosen(sample.prefill, names.SPAN_PREFILL, start_ns, sample.prefill_steps)
        span.set_attributes(
            {
                names.FIRST_STEP_ID: timing.first_step_id,
                names.PREFILL_CHUNKS: len(timing.prefill_chunks),
                names.PREEMPTIONS: timing.num_preemptions,
                names.CACHED_TOKENS: timing.num_cached_tokens,
            }
        )
        add_waits(span, [wait for wait in timing.waits if wait.start_ns >= start_ns])
        add_chunks(span, [chunk for chunk in timing.prefill_chunks if chunk.end_ns <= end_ns])
        if timing.first_token_ns:
            span.add_event(names.EVENT_FIRST_TOKEN, timestamp=unix_ns(timing.first_token_ns))
        return span

    def _chosen(
        self, chosen: SpanContext, name: str, start_ns: int, steps: list[SpanContext]
    ) -> Span:
        span = start_chosen_span(self._tracer, chosen, name, self._parent, unix_ns(start_ns))
        for step in steps:
            span.add_link(step)
        return span

    def _child(self, name: str, start_ns: int) -> Span:
        return self._tracer.start_span(name, context=self._parent, start_time=unix_ns(start_ns))


@contextmanager
def generate_span(
    metadata: Iterable[tuple[str, str | bytes]],
    time_remaining: Callable[[], float | None],
    arrival_ns: int,
    step_spans: StepSpans,
    slow_traces: SlowTraces,
) -> Iterator[GenerateSpan]:
    """The call's SERVER span, under the caller's; whatever ends the call ends it with a status."""
    context = propagation.extract(metadata)
    span = trace.get_tracer("firsttoken.engine").start_span(
        f"{_SERVICE}/{_METHOD}",
        context=context,
        kind=SpanKind.SERVER,
        attributes={
            names.RPC_SYSTEM: "grpc",
            names.RPC_SERVICE: _SERVICE,
            names.RPC_METHOD: _METHOD,
        },
        start_time=unix_ns(arrival_ns),
    )
    begins_here = not trace.get_current_span(context).get_span_context().is_valid
    generate = GenerateSpan(span, arrival_ns, step_spans, slow_traces if begins_here else None)
    error: EngineError | None = None
    code, description = 0, ""
    try:
        yield generate
    except asyncio.CancelledError:
        remaining = time_remaining()  # until the call's deadline, if it has one
        expired = remaining is not None and remaining <= _DEADLINE_SLACK_SECONDS
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
        generate.judge()


def _status_of(finish: Finish) -> Status:
    if finish.failure is not None:
        return Status(StatusCode.ERROR, finish.failure.reason)
    if finish.reason is FinishReason.ABORT:
        return Status(StatusCode.ERROR, "aborted")
    return Status(StatusCode.OK)
