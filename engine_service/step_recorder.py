"""Which steps are told of, and what of them: integers only, and nothing while nobody is traced.

A step is recorded when a watched request had a share of it or waited for it. That a request came
while a step ran, and waited in the mailbox, is known after it: so the last step is remembered.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from engine_service.messages import MAX_STEP_SHARES, StepRecord, StepShare
from engine_service.request import RequestKey
from engine_service.scheduler import Scheduler
from engine_service.scheduler_output import ModelRunnerOutput, ScheduledRequest, SchedulerOutput


class StepStamps(NamedTuple):
    """Nanoseconds of the monotonic clock, in this order."""

    drained_ns: int  # begin of the iteration: from here on commands are taken
    start_ns: int  # scheduled; the model's part begins
    mask_ns: int
    end_ns: int


class _Done(NamedTuple):
    stamps: StepStamps
    step: SchedulerOutput
    result: ModelRunnerOutput
    updated_ns: int
    num_preemptions: int
    waiting: list[RequestKey]


class StepRecorder:
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._last: _Done | None = None  # it was not recorded
        self._records: list[StepRecord] = []  # of the frame to come
        self._num_preemptions = 0  # up to the last step

    def step_done(
        self, stamps: StepStamps, step: SchedulerOutput, result: ModelRunnerOutput
    ) -> None:
        """To be called after the update."""
        watch, num_preemptions = self._scheduler.watch, self._scheduler.num_preemptions
        self._last = _Done(
            stamps,
            step,
            result,
            time.monotonic_ns(),
            num_preemptions - self._num_preemptions,
            watch.waiting(step.scheduled) if watch else [],
        )
        self._num_preemptions = num_preemptions
        if watch.take_step_is_wanted():
            self._record()

    def traced_request_came(self, arrival_ns: int) -> None:
        """It waited for the last step, if that was not over when it came."""
        if self._last is not None and arrival_ns < self._last.stamps.end_ns:
            self._record()

    def idle(self) -> None:
        """Nobody can have come during the last step any more: its requests may go."""
        self._last = None

    def take(self) -> list[StepRecord]:
        records, self._records = self._records, []
        return records

    def _record(self) -> None:
        if self._last is None:
            return
        done, self._last = self._last, None
        stamps, step, result = done.stamps, done.step, done.result
        stats = self._scheduler.stats()
        # The host may have been through with it before the device began.
        batch_ns = max(result.batch_ns, stamps.mask_ns)
        prefills = [share for share in step.scheduled if _is_prefill(share)]
        self._records.append(
            StepRecord(
                step_id=step.step_id,
                drained_ns=stamps.drained_ns,
                scheduled_ns=step.scheduled_ns,
                start_ns=stamps.start_ns,
                mask_ns=stamps.mask_ns,
                batch_ns=batch_ns,
                forward_ns=max(result.forward_ns, batch_ns) if result.forward_ns else stamps.end_ns,
                end_ns=stamps.end_ns,
                updated_ns=done.updated_ns,
                token_budget=self._scheduler.token_budget,
                num_tokens=step.num_scheduled_tokens,
                num_requests=len(step.scheduled),
                num_prefill_tokens=sum(share.num_scheduled_tokens for share in prefills),
                num_preemptions=done.num_preemptions,
                num_waiting=stats.num_waiting,
                num_free_blocks=stats.free_blocks + stats.cached_blocks,
                shares=_shares(step),
                waiting=done.waiting,
            )
        )


def _shares(step: SchedulerOutput) -> list[StepShare]:
    """The largest first: prompts before streams."""
    largest = step.scheduled
    if len(largest) > MAX_STEP_SHARES:
        largest = sorted(largest, key=lambda share: -share.num_scheduled_tokens)
    return [
        StepShare(
            share.request.request_id,
            share.request.index,
            share.num_computed_tokens,
            share.num_scheduled_tokens,
            share.request.num_cached_tokens,
            _is_prefill(share),
        )
        for share in largest[:MAX_STEP_SHARES]
    ]


def _is_prefill(share: ScheduledRequest) -> bool:
    return share.num_computed_tokens < share.request.num_admitted_tokens
