"""From what the core made of a request to the events of its stream.

Per sample: PrefillProgress after each step that prefilled, Deltas, and one Finished whose tokens
went before it. `seq` counts all events of the stream; a reader that missed one would see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from engine_service.collector import SampleEvents
from engine_service.messages import (
    AddRequest,
    Finish,
    FinishReason,
    RequestTiming,
    TokenLogprobs,
    WaitReason,
)
from protos import engine_pb2 as pb

FINISH_REASONS: Final[dict[FinishReason, pb.FinishReason.ValueType]] = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
}  # ERROR ends the call with a status instead


WAIT_REASONS: Final[dict[WaitReason, pb.WaitReason.ValueType]] = {
    WaitReason.NOT_SEEN: pb.WAIT_REASON_NOT_SEEN,
    WaitReason.GRAMMAR: pb.WAIT_REASON_GRAMMAR,
    WaitReason.PREFIX_IN_FLIGHT: pb.WAIT_REASON_PREFIX_IN_FLIGHT,
    WaitReason.NO_SLOT: pb.WAIT_REASON_NO_SLOT,
    WaitReason.NO_BUDGET: pb.WAIT_REASON_NO_BUDGET,
    WaitReason.NO_BLOCKS: pb.WAIT_REASON_NO_BLOCKS,
    WaitReason.TURN: pb.WAIT_REASON_TURN,
}


class EventBuilder:
    """Of one stream."""

    def __init__(self, request: AddRequest, relaxed: Sequence[str] = ()) -> None:
        """`relaxed`: paths of the schema keywords that were dropped for it."""
        self._request = request
        self._relaxed = relaxed
        self._num_prompt_tokens = len(request.prompt_token_ids)
        self._num_cached_tokens = [0] * request.n
        self._num_output_tokens = [0] * request.n
        self._has_computed = False
        self._seq = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(self._num_output_tokens)

    @property
    def num_used_tokens(self) -> int:
        """Prompt and answers; none of what never left the queue."""
        return self._num_prompt_tokens + self.num_output_tokens if self._has_computed else 0

    def accepted(self) -> pb.GenerateEvent:
        event = self._next(0)
        event.accepted.request_id = self._request.request_id
        event.accepted.prompt_tokens = self._num_prompt_tokens
        event.accepted.max_tokens = self._request.stopping.max_tokens
        event.accepted.relaxed.extend(self._relaxed)
        return event

    def events(self, sample: SampleEvents) -> Iterator[pb.GenerateEvent]:
        self._has_computed |= bool(sample.num_prefilled_tokens or sample.token_ids)
        if sample.num_prefilled_tokens is not None:
            yield self._prefill_progress(sample.index, sample)
        if sample.token_ids:
            yield self._delta(sample)
        if sample.finish is not None:
            yield self._finished(sample.index, sample.finish)

    def _prefill_progress(self, index: int, sample: SampleEvents) -> pb.GenerateEvent:
        self._num_cached_tokens[index] = sample.num_cached_tokens
        event = self._next(index)
        event.prefill_progress.prompt_tokens = self._num_prompt_tokens
        event.prefill_progress.computed_tokens = sample.num_prefilled_tokens or 0
        event.prefill_progress.cached_tokens = sample.num_cached_tokens
        event.prefill_progress.prompt_logprobs.extend(map(_logprobs, sample.prompt_logprobs))
        return event

    def _delta(self, sample: SampleEvents) -> pb.GenerateEvent:
        self._num_output_tokens[sample.index] += len(sample.token_ids)
        event = self._next(sample.index)
        delta = event.delta
        delta.token_ids.extend(sample.token_ids)
        if sample.logprobs:
            delta.logprobs.extend(map(_logprobs, sample.logprobs))
        if sample.timing is not None:
            delta.timing.CopyFrom(timing_message(sample.timing))
        return event

    def _finished(self, index: int, finish: Finish) -> pb.GenerateEvent:
        event = self._next(index)
        finished = event.finished
        finished.reason = FINISH_REASONS[finish.reason]
        if finish.stop_token_id is not None:
            finished.stop_token_id = finish.stop_token_id
        finished.usage.prompt_tokens = self._num_prompt_tokens
        finished.usage.cached_tokens = self._num_cached_tokens[index]
        finished.usage.completion_tokens = self._num_output_tokens[index]
        finished.timing.CopyFrom(timing_message(finish.timing))
        return event

    def _next(self, index: int) -> pb.GenerateEvent:
        event = pb.GenerateEvent(seq=self._seq, index=index)
        self._seq += 1
        return event


def timing_message(timing: RequestTiming) -> pb.Timing:
    """Stages that were not reached last from where they could have begun to the end, or to the
    first token where it is told with that.

    arrival ── queue ──── grammar wait ──── queue ── prefill ── decode ── finished
                    taken         grammar_ready   first_scheduled   first_token
    """
    end = timing.finished_ns or timing.first_token_ns
    scheduled = timing.first_scheduled_ns or end
    first_token = timing.first_token_ns or end
    return pb.Timing(
        queue_us=_us(timing.arrival_ns + timing.grammar_wait_ns, scheduled),
        grammar_wait_us=timing.grammar_wait_ns // 1_000,
        prefill_us=_us(scheduled, first_token),
        first_token_us=_us(timing.arrival_ns, timing.first_token_ns),
        decode_us=_us(first_token, end),
        prefill_chunks=len(timing.prefill_chunks),
        cached_tokens=timing.num_cached_tokens,
        preemptions=timing.num_preemptions,
        first_step_id=timing.first_step_id,
        waits=_waits(timing),
    )


def _waits(timing: RequestTiming) -> list[pb.Wait]:
    """What lies before the core took the request is told as the step that ran then."""
    if not timing.waits:
        return []
    running = pb.Wait(
        reason=pb.WAIT_REASON_RUNNING_STEP, duration_us=_us(timing.arrival_ns, timing.taken_ns)
    )
    return [
        running,
        *(
            pb.Wait(reason=WAIT_REASONS[wait.reason], duration_us=_us(wait.start_ns, wait.end_ns))
            for wait in timing.waits
        ),
    ]


def _us(start_ns: int, end_ns: int) -> int:
    return max(0, end_ns - start_ns) // 1_000


def _logprobs(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    return pb.TokenLogprobs(
        logprob=logprobs.logprob,
        rank=logprobs.rank,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )
