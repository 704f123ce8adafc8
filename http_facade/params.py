"""From a decoded request to what the engine and the text layer are asked for.

Here stand the checks that need more than one field, or the model's own limits.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from clients.types import ModelInfo, SamplingParams, StoppingCriteria, StructuredOutput
from http_facade.errors import invalid
from http_facade.schema import (
    COMPLETION_MAX_TOKENS,
    MAX_STOP_STRING_CHARS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    ResponseFormat,
)

_SEED_MODULUS = 2**64
_MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the facade does with the tokens of each sample."""

    stop: tuple[str, ...]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    min_tokens: int
    stop_token_ids: frozenset[int]
    want_logprobs: bool


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One request of either endpoint, all but its prompts."""

    sampling: SamplingParams
    stopping: StoppingCriteria
    structured_output: StructuredOutput | None
    num_logprobs: int | None
    text: TextOptions
    cache_salt: str
    priority: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool


def plan_chat(request: ChatRequest, model: ModelInfo, *, max_stop_strings: int) -> GenerationPlan:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if request.add_generation_prompt and request.continue_final_message:
        raise invalid(
            "continue_final_message", "can't be combined with add_generation_prompt being true"
        )
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _plan(request, model, num_logprobs, None, max_stop_strings)


def plan_completion(
    request: CompletionRequest, model: ModelInfo, *, max_stop_strings: int
) -> GenerationPlan:
    if request.echo and request.logprobs is not None:
        raise invalid("echo", "can't be combined with logprobs yet", code="unsupported_parameter")
    return _plan(request, model, request.logprobs, COMPLETION_MAX_TOKENS, max_stop_strings)


def _plan(
    request: GenerationFields,
    model: ModelInfo,
    num_logprobs: int | None,
    default_max_tokens: int | None,
    max_stop_strings: int,
) -> GenerationPlan:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "needs stream to be true")
    if request.best_of is not None and request.best_of != request.n:
        raise invalid("best_of", "must equal n", code="unsupported_parameter")
    if request.n > model.max_samples:
        raise invalid("n", f"at most {model.max_samples} samples are taken")
    stopping = _stopping(request, model, default_max_tokens)
    options = request.stream_options
    return GenerationPlan(
        sampling=_sampling(request, model),
        stopping=stopping,
        structured_output=_structured_output(request.response_format),
        num_logprobs=num_logprobs,
        text=TextOptions(
            stop=_stop_strings(request.stop, max_stop_strings),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            want_logprobs=num_logprobs is not None,
        ),
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        n=request.n,
        stream=request.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
    )


def _sampling(request: GenerationFields, model: ModelInfo) -> SamplingParams:
    bias = request.logit_bias or {}
    for token_id in bias:
        if token_id >= model.vocab_size:
            raise invalid("logit_bias", f"{token_id} is no token id of this model")
    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=None if request.top_k is None else min(request.top_k, _MAX_TOP_K),
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=bias,
        # negative seeds are seeds like others: the same bits, read as unsigned
        seed=None if request.seed is None else request.seed % _SEED_MODULUS,
        n=request.n,
    )


def _stopping(
    request: GenerationFields, model: ModelInfo, default_max_tokens: int | None
) -> StoppingCriteria:
    max_tokens = _max_tokens(request, default_max_tokens)
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        raise invalid("min_tokens", f"is more than max_tokens ({max_tokens})")
    stop_token_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    for token_id in stop_token_ids:
        if token_id >= model.vocab_size:
            raise invalid("stop_token_ids", f"{token_id} is no token id of this model")
    return StoppingCriteria(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop_token_ids=stop_token_ids,
        ignore_eos=request.ignore_eos,
    )


def _max_tokens(request: GenerationFields, default: int | None) -> int | None:
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise invalid("max_tokens", f"differs from max_completion_tokens ({new}): give one of them")
    given = new if new is not None else old
    return default if given is None else given


def _stop_strings(stop: str | list[str] | None, max_stop_strings: int) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if len(strings) > max_stop_strings:
        raise invalid("stop", f"at most {max_stop_strings} stop strings are taken")
    for i, string in enumerate(strings):
        param = "stop" if isinstance(stop, str) else f"stop[{i}]"
        if not string:
            raise invalid(param, "a stop string can't be empty")
        if len(string) > MAX_STOP_STRING_CHARS:
            raise invalid(
                param, f"a stop string has at most {MAX_STOP_STRING_CHARS} characters here"
            )
    return tuple(dict.fromkeys(strings))


def _structured_output(response_format: ResponseFormat | None) -> StructuredOutput | None:
    if response_format is None:
        return None
    if response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise invalid("response_format.json_schema", "is required with type json_schema")
        schema = msgspec.json.encode(response_format.json_schema.schema).decode()
        return StructuredOutput(json_schema=schema)
    if response_format.json_schema is not None:
        raise invalid("response_format.json_schema", "needs type json_schema")
    return StructuredOutput(json_object=True) if response_format.type == "json_object" else None
