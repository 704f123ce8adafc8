"""One sample of one generation, as the engine core holds it.

    tokens      |<---------- prompt ---------->|<--- output --->|
    KV cache    |<- cached ->|<- computed ->|  (rest: not yet)  |
                0            num_cached     num_computed        num_tokens

Each step moves `num_computed_tokens` towards `num_tokens`; when it arrives there, the step's last
row of logits is the next token's. Nothing here knows of prefill or decode.

While a step is under way the next one may be planned: as if all that it computes were computed, and
the token that it yields were there.

    KV cache    |<- computed ->|<-- in flight -->|
    tokens      |<-- num_tokens ---------------->|<- pending ->|
                                           num_planned    num_expected

    WAITING_FOR_GRAMMAR ──> WAITING ──> RUNNING ──> FINISHED_STOP, FINISHED_LENGTH
                                        │     ^
                                        v     │     and from every state:
                                       PREEMPTED    FINISHED_ABORT, FINISHED_ERROR
"""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, field

from engine_service.messages import (
    FinishReason,
    PrefillChunk,
    RequestTiming,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.token_counts import TokenCounts
from engine_service.token_lists import TokenLists
from engine_service.wait_log import WaitLog

RequestKey = tuple[str, int]  # (request_id, sample index)


class RequestStatus(enum.Enum):
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOP = "finished_stop"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORT = "finished_abort"
    FINISHED_ERROR = "finished_error"

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED


FINISHED_STATUS: dict[FinishReason, RequestStatus] = {
    FinishReason.STOP: RequestStatus.FINISHED_STOP,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORT,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}

_FINISHED = frozenset(FINISHED_STATUS.values())


@dataclass(slots=True, eq=False)
class Request:
    """Owned by the scheduler; the model runner and the sampler only read it."""

    request_id: str
    index: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stopping: StoppingCriteria
    structured_output: StructuredOutput | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    arrival_ns: int = 0
    deadline_ns: int = 0  # 0: none
    shared_lists: InitVar[TokenLists | None] = None  # of the request's other samples

    key: RequestKey = field(init=False)
    # (nanoseconds, order of adding); the lowest is first
    rank: tuple[int, int] = (0, 0)  # among the running: arrival and priority
    place: tuple[int, int] = (0, 0)  # among those of its tenant that wait: its length, too
    status: RequestStatus = RequestStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(init=False)  # prompt, then output
    token_lists: TokenLists = field(init=False)
    token_counts: TokenCounts | None = None  # kept where penalties need them
    block_hashes: list[bytes] = field(default_factory=list)  # of its full blocks, made on demand

    num_computed_tokens: int = 0  # tokens whose KV exists
    num_in_flight_tokens: int = 0  # after those, in steps that are under way
    num_pending_outputs: int = 0  # which these steps will yield; at most one each
    num_cached_tokens: int = 0  # of those, prefix hits of the first scheduling
    num_prefilled_tokens: int = 0  # prompt tokens that ever had KV: never falls, as progress
    num_admitted_tokens: int = 0  # known when last admitted; computing these is prefill

    grammar_ready_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    num_preemptions: int = 0
    first_step_id: int = 0
    prefill_chunks: list[PrefillChunk] = field(default_factory=list)
    taken_ns: int = 0
    grammar_was_cached: bool = False
    tells_timing: bool = False  # with its first token
    wait_log: WaitLog | None = None  # of one that is watched, or was

    def __post_init__(self, shared_lists: TokenLists | None) -> None:
        self.key = (self.request_id, self.index)
        self.token_lists = shared_lists or TokenLists.of(self.sampling, self.stopping)
        self.token_ids = list(self.prompt_token_ids)
        if self.sampling.counts_tokens:
            prompt_weighs = self.sampling.repetition_penalty != 1.0
            self.token_counts = TokenCounts.of_prompt(
                self.prompt_token_ids if prompt_weighs else ()
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_planned_tokens(self) -> int:
        """Whose KV exists, or will when the steps under way are over."""
        return self.num_computed_tokens + self.num_in_flight_tokens

    @property
    def num_expected_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_outputs

    @property
    def num_expected_outputs(self) -> int:
        return len(self.output_token_ids) + self.num_pending_outputs

    @property
    def is_prefilling(self) -> bool:
        """Of what it knew when it was admitted, some is neither computed nor in flight."""
        return self.num_planned_tokens < self.num_admitted_tokens

    @property
    def next_depends_on_last(self) -> bool:
        """Whether the last token must be known before the next one can be sampled: its grammar or
        its penalties want to see it. (The model itself gets it from the device.)"""
        return (
            self.structured_output is not None
            or self.token_counts is not None
            or self.token_lists.bad_sequences is not None
        )

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token; they are told once, with sample 0."""
        return self.sampling.num_prompt_logprobs if self.index == 0 else None

    @property
    def computes_whole_prompt(self) -> bool:
        """Whether a cached prefix is of no use: the logits of its tokens are not in the cache."""
        return (
            self.num_prompt_logprobs is not None
            and self.num_prefilled_tokens < self.num_prompt_tokens
        )

    def append_output(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.token_ids.append(token_id)
        if self.token_counts is not None:
            self.token_counts.add(token_id)

    def timing(self) -> RequestTiming:
        return RequestTiming(
            arrival_ns=self.arrival_ns,
            grammar_ready_ns=self.grammar_ready_ns,
            first_scheduled_ns=self.first_scheduled_ns,
            first_token_ns=self.first_token_ns,
            finished_ns=self.finished_ns,
            num_preemptions=self.num_preemptions,
            first_step_id=self.first_step_id,
            prefill_chunks=tuple(self.prefill_chunks),
            taken_ns=self.taken_ns,
            waits=() if self.wait_log is None else self.wait_log.waits(self.finished_ns),
            num_cached_tokens=self.num_cached_tokens,
            grammar_was_cached=self.grammar_was_cached,
        )
