"""How much prompt a step may compute besides the tokens of running streams.

Three limits, of which the smallest holds for a chunk: the token budget, the longest chunk
(`long_prefill_token_threshold`), and, with `target_itl_ms`, the time that the step has left. Time
is short only while a stream runs that would have to wait for the chunk, and never takes all: a
few tokens of prompt are computed in every step, so that no prompt starves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine_service.config import SchedulerConfig
from engine_service.errors import InvalidRequest
from engine_service.scheduler_output import ScheduledRequest
from engine_service.step_time import StepTime, StepTimeModel, num_reads

MIN_PREFILL_TOKENS: Final = 8  # in each step, if there is prompt to compute and budget left


@dataclass(slots=True)
class StepRoom:
    """What is left of one step."""

    token_budget: int
    longest_chunk: int  # tokens
    step_time: StepTime | None = None  # set: time is short
    seconds_left: float = 0.0
    min_tokens_left: int = MIN_PREFILL_TOKENS  # that the time can't take

    def chunk(self, num_computed_tokens: int, num_missing_tokens: int) -> int:
        """How many of a request's missing tokens this step may compute; 0: the step is full."""
        limit = min(num_missing_tokens, self.token_budget, self.longest_chunk)
        if self.step_time is None:
            return limit
        within = self.step_time.tokens_within(self.seconds_left, num_computed_tokens)
        return min(limit, max(int(min(within, limit)), self.min_tokens_left))

    def take_chunk(self, num_computed_tokens: int, num_tokens: int) -> None:
        self.token_budget -= num_tokens
        if self.step_time is not None:
            self.min_tokens_left = max(self.min_tokens_left - num_tokens, 0)
            reads = num_reads(num_computed_tokens, num_tokens)
            self.seconds_left -= self.step_time.added_seconds(num_tokens, reads)


class PrefillPace:
    def __init__(self, config: SchedulerConfig) -> None:
        if config.long_prefill_token_threshold < 0:
            raise InvalidRequest("must not be negative", field="long_prefill_token_threshold")
        if config.target_itl_ms is not None and config.target_itl_ms <= 0:
            raise InvalidRequest("must be more than 0", field="target_itl_ms")
        self.token_budget = config.max_num_batched_tokens  # of a step
        self._longest_chunk = config.long_prefill_token_threshold or self.token_budget
        self._target_seconds: float | None = None
        if config.target_itl_ms is not None:
            self._target_seconds = config.target_itl_ms / 1000
        self._model = StepTimeModel()

    def new_step(self) -> StepRoom:
        return StepRoom(self.token_budget, self._longest_chunk)

    def keep(self, room: StepRoom, streams: Sequence[ScheduledRequest]) -> None:
        """Time is short from here on, if there are streams; they are what the step computes yet."""
        step_time = self._model.step_time
        if self._target_seconds is not None and step_time is not None and streams:
            room.step_time = step_time
            taken = step_time.seconds(*_tokens_and_reads(streams))
            room.seconds_left = self._target_seconds - taken

    def prefill_ns(self, num_computed_tokens: int, num_missing_tokens: int) -> int:
        """What the rest of a prompt adds to steps made anyway; 0 if too little is known."""
        if self._model.step_time is None:
            return 0
        reads = num_reads(num_computed_tokens, num_missing_tokens)
        return round(self._model.step_time.added_seconds(num_missing_tokens, reads) * 1e9)

    def observe(self, shares: Sequence[ScheduledRequest], seconds: float) -> None:
        """Learns from a step."""
        self._model.observe(*_tokens_and_reads(shares), seconds)


def _tokens_and_reads(shares: Sequence[ScheduledRequest]) -> tuple[int, int]:
    num_tokens = reads = 0
    for share in shares:
        num_tokens += share.num_scheduled_tokens
        reads += num_reads(share.num_computed_tokens, share.num_scheduled_tokens)
    return num_tokens, reads
