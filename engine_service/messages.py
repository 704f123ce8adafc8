"""The frozen data that crosses between the engine service (P2) and the engine core (P1).

One frame a step in each direction: a list of `Command` in, one `Frame` out. Token ids are plain
ints, times are nanoseconds of CLOCK_MONOTONIC, which both processes share. Values arrive in the
core already validated and resolved (defaults applied, max_tokens clamped, a seed drawn).
"""

from __future__ import annotations

import enum
from typing import Final, Literal

import msgspec


class FinishReason(enum.IntEnum):
    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# ---------------------------------------------------------------- a request


class SamplingParams(_Message, frozen=True):
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # the edge draws one when the caller gave none
    num_logprobs: int | None = None  # alternatives per token; 0: the chosen one only
    num_prompt_logprobs: int | None = None  # the same, per prompt token after the first
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()  # the output never comes to contain one

    @property
    def counts_tokens(self) -> bool:
        """Whether what was said before weighs on what is said next."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class StoppingCriteria(_Message, frozen=True):
    max_tokens: int  # effective, at least 1
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # the caller's
    eos_token_ids: tuple[int, ...] = ()  # the model's; empty under ignore_eos


GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice", "structural_tag"]


class StructuredOutput(_Message, frozen=True):
    """A grammar's source; equal values share one compiled grammar."""

    kind: GrammarKind
    source: str = ""  # as the caller wrote it; of a choice, its values as a JSON list

    @property
    def field(self) -> str:
        """How callers name it, in errors."""
        return f"structured_output.{self.kind}"


class AddRequest(_Message, frozen=True):
    """n samples of one prompt; sample i is the core's request (request_id, i)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    stopping: StoppingCriteria
    structured_output: StructuredOutput | None = None
    n: int = 1
    priority: int = 0  # lower runs first
    tenant: str = ""
    cache_salt: str = ""
    arrival_ns: int = 0
    deadline_ns: int = 0  # ends with DEADLINE_EXCEEDED from then on; 0: none
    is_traced: bool = False  # the steps that it waits for, or is computed in, are recorded
    tells_timing: bool = False  # its first token comes with the timing so far


class AbortRequest(_Message, frozen=True):
    """Ends samples with FinishReason.ABORT; unknown ones are ignored."""

    request_id: str
    indices: tuple[int, ...] = ()  # empty: all


class FlushPrefixCache(_Message, frozen=True):
    """Forget every cached prefix; answered by one `PrefixCacheFlushed`, in order."""


class Shutdown(_Message, frozen=True):
    """Leave the step loop now; what still runs gets no answer."""


Command = AddRequest | AbortRequest | FlushPrefixCache | Shutdown


# ---------------------------------------------------------------- what comes back


class TokenLogprobs(_Message, frozen=True):
    """Natural logs of the raw model distribution, before temperature, bias and masks."""

    logprob: float
    rank: int  # of the chosen token; 1 is the most likely
    top_token_ids: list[int]
    top_logprobs: list[float]


class WaitReason(enum.IntEnum):
    """Why a request that could be computed is not, or why it can't be."""

    NOT_SEEN = 0  # it is in the core, but the scheduler has not run since
    GRAMMAR = 1  # its grammar compiles
    PREFIX_IN_FLIGHT = 2  # another request computes the block that it needs next
    NO_SLOT = 3  # as many run as may
    NO_BUDGET = 4  # the step's tokens, or its time, went to others
    NO_BLOCKS = 5  # of the KV cache
    TURN = 6  # another tenant's, which came later but has had less


class Wait(_Message, frozen=True):
    reason: WaitReason
    start_ns: int
    end_ns: int


class PrefillChunk(_Message, frozen=True):
    """One step's share of a request's prompt (or of its recompute after a preemption)."""

    step_id: int
    start_ns: int
    end_ns: int
    num_tokens: int
    scheduled_ns: int = 0  # when the step was scheduled
    num_step_tokens: int = 0  # of all requests in the step, its own included


class RequestTiming(_Message, frozen=True):
    """Stamps of one sample; 0 means: did not happen."""

    arrival_ns: int
    grammar_ready_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    finished_ns: int = 0
    num_preemptions: int = 0
    first_step_id: int = 0
    prefill_chunks: tuple[PrefillChunk, ...] = ()
    taken_ns: int = 0  # the core took it from its mailbox
    waits: tuple[Wait, ...] = ()  # up to the first token; of requests that are traced or tell it
    num_cached_tokens: int = 0
    grammar_was_cached: bool = False  # nothing was to be compiled for it

    @property
    def grammar_wait_ns(self) -> int:
        """From the core's taking it to its grammar; 0: it had none, or never got it."""
        return self.grammar_ready_ns - self.taken_ns if self.grammar_ready_ns else 0


class Failure(_Message, frozen=True):
    """Why a sample ended with FinishReason.ERROR; `errors.ERRORS_BY_REASON` has the types."""

    reason: str
    message: str
    field: str = ""


class Finish(_Message, frozen=True):
    reason: FinishReason
    timing: RequestTiming
    stop_token_id: int | None = None
    failure: Failure | None = None


class RequestOutput(_Message, frozen=True):
    """What one step made of one sample; `finish` comes once, with the last tokens or after them."""

    request_id: str
    index: int
    new_token_ids: list[int] = []
    new_logprobs: list[TokenLogprobs] = []  # empty, or one per new token
    num_prefilled_tokens: int | None = None  # prompt tokens with KV; set by steps that prefilled
    num_cached_tokens: int = 0  # of those, from the prefix cache
    finish: Finish | None = None
    new_prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens after the first, each once
    timing: RequestTiming | None = None  # with the first token, where it is asked for


class StepShare(msgspec.Struct, frozen=True, array_like=True):
    """What one request had of a step."""

    request_id: str
    index: int
    num_computed_tokens: int  # before it
    num_tokens: int
    num_cached_tokens: int  # of those before it, found in the prefix cache when it was admitted
    is_prefill: bool


class StepRecord(_Message, frozen=True):
    """One step, told because a traced request waited for it or had its prompt computed in it.

    drained --take commands-- scheduled --schedule-- start --mask, batch, forward, sample-- end
            --update-- updated
    """

    step_id: int
    drained_ns: int
    scheduled_ns: int
    start_ns: int
    mask_ns: int  # each of these: the end of that part
    batch_ns: int
    forward_ns: int
    end_ns: int
    updated_ns: int
    token_budget: int
    num_tokens: int
    num_requests: int
    num_prefill_tokens: int
    num_preemptions: int
    num_waiting: int
    num_free_blocks: int  # cached ones included
    shares: list[StepShare]  # the largest, up to MAX_STEP_SHARES
    waiting: list[tuple[str, int]]  # traced samples without a share


MAX_STEP_SHARES: Final = 64


class CoreStats(_Message, frozen=True):
    """Gauges as of now, counters since this core started."""

    num_running: int = 0
    num_waiting: int = 0
    total_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    num_steps: int = 0
    num_prompt_tokens: int = 0  # prompt tokens computed (cached ones left out)
    num_generated_tokens: int = 0
    num_forced_tokens: int = 0  # of those, taken without a step: the grammar allowed no other
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0  # tokens


class StepFrame(_Message, frozen=True):
    """One step, or a heartbeat of an idle core (no outputs, step_id of the last step)."""

    step_id: int
    start_ns: int
    end_ns: int
    num_scheduled_tokens: int
    outputs: list[RequestOutput]
    stats: CoreStats
    records: list[StepRecord] = []  # of this step, and of the one before it
    grammar_compile_times_ns: list[int] = []  # of those that ended since the frame before


class PrefixCacheFlushed(_Message, frozen=True):
    num_blocks: int  # that held a cached prefix
    stats: CoreStats


class Ready(_Message, frozen=True):
    """First frame of a core: the model is loaded, the pool is allocated."""

    pid: int
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    batch_invariant: bool
    op_backends: dict[str, str]
    weights_digest: str


class StartFailed(_Message, frozen=True):
    """Only frame of a core that could not start: the configuration is at fault, not the machine."""

    message: str


Frame = Ready | StepFrame | PrefixCacheFlushed | StartFailed
