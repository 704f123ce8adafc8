"""What callers of `EngineClient` give and get: plain frozen data, no protobuf.

None means: the model's or the server's default.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int | None = None
    allowed_token_ids: Sequence[int] = ()  # empty: all
    bad_token_sequences: Sequence[Sequence[int]] = ()  # the output never contains one of them


@dataclass(frozen=True, slots=True)
class StoppingCriteria:
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Exactly one constraint is set."""

    json_schema: str | None = None  # a JSON Schema document
    json_object: bool = False
    regex: str | None = None  # matches the whole text
    grammar: str | None = None  # EBNF as llama.cpp writes it, from the rule `root`
    choice: Sequence[str] = ()  # one of these texts, exactly
    structural_tag: str | None = None  # a structural tag of xgrammar, as JSON
    relax_unenforced: bool = False  # drop schema keywords that can't be enforced, and name them


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    prompt: str | Sequence[int]  # text is tokenized by the engine service
    request_id: str = ""  # empty: made up by the client, `client-<random>`
    model: str = ""
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingCriteria = StoppingCriteria()
    structured_output: StructuredOutput | None = None
    num_logprobs: int | None = None  # alternatives per token, 0: the chosen one only
    num_prompt_logprobs: int | None = None  # the same, per prompt token after the first
    tells_timing: bool = False  # the first Delta of each sample carries its timing so far
    cache_salt: str = ""  # divides the cached prefixes of its tenant; never joins others'
    priority: int | None = None  # lower runs first; clamped to the server's range
    tenant: str = ""  # whom it is for; not to be taken from what a caller of yours says
    tokenizer_digest: str = ""
    attempt: int | None = None  # of its caller, from 1; None: not known; our own retries count on


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Accepted:
    request_id: str
    prompt_tokens: int
    max_tokens: int
    relaxed: tuple[str, ...] = ()  # paths of schema keywords that were dropped


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    index: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of sample 0; the next ones after the first


@dataclass(frozen=True, slots=True)
class Delta:
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or one per token
    timing: Timing | None = None  # with a sample's first tokens, where it was asked for


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Wait:
    """`reason`: running_step, not_seen, grammar, prefix_in_flight, no_slot, no_budget, no_blocks,
    turn; `protos/engine.proto` says what each means."""

    reason: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of the engine's monotonic clock."""

    queue_seconds: float
    grammar_wait_seconds: float
    prefill_seconds: float
    first_token_seconds: float
    decode_seconds: float
    prefill_chunks: int
    cached_tokens: int
    preemptions: int
    first_step_id: int
    waits: tuple[Wait, ...] = ()  # up to the first token; of requests that ask, or are traced


@dataclass(frozen=True, slots=True)
class Finished:
    index: int
    reason: FinishReason
    usage: Usage
    timing: Timing
    stop_token_id: int | None = None


GenerateEvent = Accepted | PrefillProgress | Delta | Finished


# ---------------------------------------------------------------- about the engine


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    architecture: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_digest: str
    weights_digest: str
    generation_defaults: GenerationDefaults
    max_output_tokens: int
    max_samples: int
    created_unix_seconds: int
    max_queued_samples: int  # waiting at once; calls for more can't all be let in
    max_queued_tokens: int  # prompt tokens waiting at once, each sample's counted


@dataclass(frozen=True, slots=True)
class ServerInfo:
    version: str
    api_version: str
    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    op_backends: Mapping[str, str]
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    start_unix_nanos: int
    core_starts: int
    core_pid: int
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class LoadReport:
    ready: bool
    num_running: int
    num_waiting: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    num_steps: int
    prompt_tokens: int
    generated_tokens: int
    num_preemptions: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    digest: str
    files: Mapping[str, bytes]  # tokenizer.json, tokenizer_config.json, chat_template.jinja, ...
