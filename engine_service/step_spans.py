"""`engine.step` spans, each a trace of its own, made of what the core recorded of a step.

    sample of a request                              engine.step
      queue span    <──────────── links ───────────>   what it waited for
      prefill span  <──────────── links ───────────>   what computed its prompt

Both sides must know the other's id when they are made, and the sample's spans are made last: so a
sample gets the ids of its queue and prefill spans when it comes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, SpanContext, format_trace_id
from opentelemetry.util.types import AttributeValue

from engine_service.messages import StepRecord
from traces import names
from traces.clock import unix_ns
from traces.span_ids import future_span

RequestKey = tuple[str, int]

MAX_LINKS: Final = 128  # of a step; the requests that it touched


@dataclass(slots=True)
class SampleSteps:
    """The steps that one sample waited for, and those that computed its prompt."""

    submitted_ns: int
    queue: SpanContext
    prefill: SpanContext
    came_during_step: bool = False  # it lay in the mailbox until that was over
    queue_steps: list[SpanContext] = field(default_factory=list)
    prefill_steps: list[SpanContext] = field(default_factory=list)

    @classmethod
    def under(cls, server: SpanContext, submitted_ns: int) -> SampleSteps:
        return cls(submitted_ns, future_span(server), future_span(server))

    @property
    def span_that_waits(self) -> SpanContext:
        """Its prefill, when that has begun."""
        return self.prefill if self.prefill_steps else self.queue

    def waited_for(self, step: SpanContext) -> None:
        (self.prefill_steps if self.prefill_steps else self.queue_steps).append(step)


class StepSpans:
    """Of one engine service. Nothing is done while nobody is traced: no record comes then."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("firsttoken.engine")
        self._samples: dict[RequestKey, SampleSteps] = {}  # that have no first token yet
        self._trace_ids: dict[RequestKey, str] = {}  # of all that live

    def watch(self, key: RequestKey, sample: SampleSteps) -> None:
        """A traced sample comes."""
        self._samples[key] = sample
        self._trace_ids[key] = format_trace_id(sample.queue.trace_id)

    def first_token(self, key: RequestKey) -> None:
        """From here on no step is linked to it."""
        self._samples.pop(key, None)

    def ended(self, key: RequestKey) -> None:
        self._samples.pop(key, None)
        self._trace_ids.pop(key, None)

    def add(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            computed, waiting = self._touched(record)
            if computed or waiting:
                context = self._add(record, computed, waiting)
                for sample in computed:
                    sample.prefill_steps.append(context)
                for sample in waiting:
                    sample.waited_for(context)

    def _touched(self, record: StepRecord) -> tuple[list[SampleSteps], list[SampleSteps]]:
        """The samples whose prompts it computed, and those that waited for it."""
        served = {(share.request_id, share.index) for share in record.shares}
        told = set(record.waiting)
        computed: list[SampleSteps] = []
        waiting: list[SampleSteps] = []
        for key, sample in self._samples.items():
            if key in served:
                computed.append(sample)
            elif record.drained_ns <= sample.submitted_ns < record.end_ns:
                sample.came_during_step = True
                waiting.append(sample)
            elif key in told:
                waiting.append(sample)
        return computed, waiting

    def _add(
        self, record: StepRecord, computed: list[SampleSteps], waiting: list[SampleSteps]
    ) -> SpanContext:
        touched = [sample.prefill for sample in computed]
        touched += [sample.span_that_waits for sample in waiting]
        span = self._tracer.start_span(
            names.SPAN_STEP,
            context=Context(),  # a trace of its own
            start_time=unix_ns(record.scheduled_ns),
            attributes=self._attributes(record),
            links=[Link(context) for context in touched[:MAX_LINKS]],
        )
        span.end(unix_ns(record.updated_ns))
        return span.get_span_context()

    def _attributes(self, record: StepRecord) -> dict[str, AttributeValue]:
        shares = record.shares
        return {
            names.STEP_ID: record.step_id,
            names.STEP_BUDGET_TOKENS: record.token_budget,
            names.STEP_TOKENS: record.num_tokens,
            names.STEP_REQUESTS: record.num_requests,
            names.STEP_PREFILL_TOKENS: record.num_prefill_tokens,
            names.STEP_PREEMPTIONS: record.num_preemptions,
            names.STEP_WAITING: record.num_waiting,
            names.STEP_FREE_BLOCKS: record.num_free_blocks,
            names.STEP_COMMANDS_US: _us(record.drained_ns, record.scheduled_ns),
            names.STEP_SCHEDULE_US: _us(record.scheduled_ns, record.start_ns),
            names.STEP_MASK_US: _us(record.start_ns, record.mask_ns),
            names.STEP_BATCH_US: _us(record.mask_ns, record.batch_ns),
            names.STEP_FORWARD_US: _us(record.batch_ns, record.forward_ns),
            names.STEP_SAMPLE_US: _us(record.forward_ns, record.end_ns),
            names.STEP_UPDATE_US: _us(record.end_ns, record.updated_ns),
            names.STEP_SHARE_REQUESTS: [share.request_id for share in shares],
            names.STEP_SHARE_TRACES: [
                self._trace_ids.get((share.request_id, share.index), "") for share in shares
            ],
            names.STEP_SHARE_TOKENS: [share.num_tokens for share in shares],
            names.STEP_SHARE_COMPUTED: [share.num_computed_tokens for share in shares],
            names.STEP_SHARE_CACHED: [share.num_cached_tokens for share in shares],
            names.STEP_SHARE_PREFILL: [share.is_prefill for share in shares],
        }


def _us(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1_000
