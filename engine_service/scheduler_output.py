"""What one step computes, and what came of it: the data between scheduler, runner and core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

from engine_service.messages import Failure, TokenLogprobs
from engine_service.request import Request, RequestKey, RequestStatus


class ScheduledRequest(NamedTuple):
    """A request's share of one step: tokens [num_computed, num_computed + num_scheduled).

    Valid until `update_from_output` of the same step. `block_ids` covers all tokens up to the end
    of the share, must not be changed by the reader, and is read before the next step is planned.
    """

    request: Request
    num_computed_tokens: int  # before the step, those of steps under way included
    num_scheduled_tokens: int
    block_ids: Sequence[int]
    samples: bool  # it reaches the last token there is, so that the step yields the next one
    num_preemptions: int  # of the request, so far: one that was preempted since has lost the share

    @classmethod
    def of(
        cls, request: Request, num_computed: int, num_scheduled: int, block_ids: Sequence[int]
    ) -> Self:
        samples = num_computed + num_scheduled == request.num_expected_tokens
        preemptions = request.num_preemptions
        return cls(request, num_computed, num_scheduled, block_ids, samples, preemptions)

    @property
    def is_current(self) -> bool:
        """Whether the request still runs, and holds the blocks that the step was planned for."""
        request = self.request
        return (
            request.status is RequestStatus.RUNNING
            and request.num_preemptions == self.num_preemptions
        )

    @property
    def prompt_logprobs_range(self) -> range:
        """Positions of the share whose logits tell the logprob of the prompt token after them.

        A position counts once: not again when it is recomputed after a preemption.
        """
        request = self.request
        if request.num_prompt_logprobs is None:
            return range(0)
        end = self.num_computed_tokens + self.num_scheduled_tokens
        start = max(self.num_computed_tokens, request.num_prefilled_tokens)
        return range(start, min(end, request.num_prompt_tokens - 1))


class BlockCopy(NamedTuple):
    """Block ids. Of the copies of one step no destination is another's, or any one's source."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    step_id: int
    scheduled: list[ScheduledRequest]
    num_scheduled_tokens: int  # sum over `scheduled`, at most the token budget
    block_copies: list[BlockCopy] = field(default_factory=list)  # to be made before the forward
    scheduled_ns: int = 0  # when it was decided

    @property
    def sampling_requests(self) -> list[Request]:
        """Those that yield a token, in scheduled order."""
        return [share.request for share in self.scheduled if share.samples]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """By request key; requests whose share did not reach their last token are absent."""

    sampled_token_ids: dict[RequestKey, int]
    logprobs: dict[RequestKey, TokenLogprobs] = field(default_factory=dict)
    failures: dict[RequestKey, Failure] = field(default_factory=dict)  # NaN logits, ...
    prompt_logprobs: dict[RequestKey, list[TokenLogprobs]] = field(default_factory=dict)
    batch_ns: int = 0  # when the batch was built; 0: not told, as in the next
    forward_ns: int = 0  # when the forward returned (on a GPU: was launched)


class StepUnderWay(Protocol):
    """A step that was given to the device, which may still compute it."""

    def wait(self) -> ModelRunnerOutput:
        """What came of it; to be called once. What is raised concerns all of the step."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """A StepUnderWay that is over."""

    output: ModelRunnerOutput

    def wait(self) -> ModelRunnerOutput:
        return self.output
