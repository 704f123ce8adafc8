"""From a decoded request to what the engine and the text layer are asked for.

Here stand the checks that need more than one field, or the model's own limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from clients.text.tool_parsers import ToolFormat
from clients.text.tool_parsers.format import NO_IDS
from clients.types import ModelInfo, SamplingParams, StoppingCriteria
from http_facade.answers import AnswerOptions
from http_facade.constraints import Constraint, constraint_of
from http_facade.errors import invalid
from http_facade.prompts import Prompt
from http_facade.reasoning import ReasoningPlan, ReasoningSettings, plan_reasoning
from http_facade.schema import (
    COMPLETION_MAX_TOKENS,
    MAX_STOP_STRING_CHARS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
)
from http_facade.tools import ToolPlan, plan_tools

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
    prompt_only: bool  # no token is generated: the prompt is computed and echoed


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """One request of either endpoint, all but its prompts."""

    sampling: SamplingParams
    stopping: StoppingCriteria
    constraint: Constraint | None
    tools: ToolPlan | None  # None: no calls are looked for in the text
    reasoning: ReasoningPlan | None  # None: no thought is looked for
    num_logprobs: int | None
    num_prompt_logprobs: int | None
    text: TextOptions
    answer: AnswerOptions
    cache_salt: str
    cache_key: str | None  # which requests have a prefix in common, where the caller says so
    priority: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    timings: bool  # the answer says where its time went


def plan_chat(
    request: ChatRequest,
    model: ModelInfo,
    *,
    tool_format: ToolFormat,
    special_markers: Mapping[str, int] = NO_IDS,
    reasoning: ReasoningSettings | None = None,
    max_stop_strings: int,
    bad_token_sequences: Sequence[Sequence[int]] = (),
) -> GenerationPlan:
    """`tool_format`, `reasoning`: the model's; no reasoning: it writes no thoughts.
    `special_markers`: of the format's, the ids of those that are special tokens.
    `bad_token_sequences`: the request's bad_words, in tokens."""
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if request.add_generation_prompt and request.continue_final_message:
        raise invalid(
            "continue_final_message", "can't be combined with add_generation_prompt being true"
        )
    num_logprobs = (request.top_logprobs or 0) if request.logprobs else None
    answer = AnswerOptions(
        want_logprobs=request.logprobs,
        want_token_ids=request.return_token_ids,
        num_prompt_logprobs=request.prompt_logprobs,
        reasoning_fields=reasoning.fields if reasoning and request.include_reasoning else (),
    )
    sampling = _sampling(request, model, bad_token_sequences)
    stopping = _stopping(request, model, None)
    plan = _plan(request, model, sampling, stopping, num_logprobs, answer, max_stop_strings)
    tools = plan_tools(request, tool_format, plan.constraint, special_markers)
    is_constrained = plan.constraint is not None or (tools is not None and tools.is_forced)
    plan = replace(
        plan, reasoning=plan_reasoning(request, reasoning, is_constrained=is_constrained)
    )
    return plan if tools is None else replace(plan, tools=tools, constraint=tools.constraint)


def think_first(plan: GenerationPlan, prompt: Prompt) -> GenerationPlan:
    """`plan`, its constraint moved behind the thought with which the answer begins."""
    if plan.reasoning is None:
        return plan
    return replace(plan, constraint=plan.reasoning.constraint(plan.constraint, prompt.text))


def plan_completion(
    request: CompletionRequest,
    model: ModelInfo,
    *,
    max_stop_strings: int,
    bad_token_sequences: Sequence[Sequence[int]] = (),
) -> GenerationPlan:
    """`bad_token_sequences`: the request's bad_words, in tokens."""
    answer = AnswerOptions(
        want_logprobs=request.logprobs is not None,
        want_token_ids=request.return_token_ids,
        num_echo_logprobs=request.logprobs if request.echo else None,
        num_prompt_logprobs=request.prompt_logprobs,
    )
    sampling = _sampling(request, model, bad_token_sequences)
    stopping = _stopping(request, model, COMPLETION_MAX_TOKENS)
    if stopping.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "must be at least 1; 0 needs echo")
    return _plan(request, model, sampling, stopping, request.logprobs, answer, max_stop_strings)


def _plan(
    request: GenerationFields,
    model: ModelInfo,
    sampling: SamplingParams,
    stopping: StoppingCriteria,
    num_logprobs: int | None,
    answer: AnswerOptions,
    max_stop_strings: int,
) -> GenerationPlan:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "needs stream to be true")
    if request.best_of is not None and request.best_of != request.n:
        raise invalid("best_of", "must equal n", code="unsupported_parameter")
    if request.n > model.max_samples:
        raise invalid("n", f"at most {model.max_samples} samples are taken")
    options = request.stream_options
    prompt_only = stopping.max_tokens == 0
    return GenerationPlan(
        sampling=sampling,
        # The engine has no word for "none": it is left when the prompt is computed.
        stopping=replace(stopping, max_tokens=1) if prompt_only else stopping,
        constraint=constraint_of(request),
        tools=None,
        reasoning=None,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=_larger(answer.num_echo_logprobs, answer.num_prompt_logprobs),
        answer=answer,
        text=TextOptions(
            stop=_stop_strings(request.stop, max_stop_strings),
            include_stop_str_in_output=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.min_tokens or 0,
            stop_token_ids=frozenset(stopping.stop_token_ids),
            want_logprobs=num_logprobs is not None,
            prompt_only=prompt_only,
        ),
        cache_salt=request.cache_salt or "",
        cache_key=request.prompt_cache_key,
        priority=request.priority,
        n=request.n,
        stream=request.stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        timings=request.timings,
    )


def _larger(one: int | None, other: int | None) -> int | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _check_token_ids(token_ids: Iterable[int], model: ModelInfo, param: str) -> None:
    for token_id in token_ids:
        if token_id >= model.vocab_size:
            raise invalid(param, f"{token_id} is no token id of this model")


def _sampling(
    request: GenerationFields, model: ModelInfo, bad_token_sequences: Sequence[Sequence[int]]
) -> SamplingParams:
    bias = request.logit_bias or {}
    allowed = request.allowed_token_ids or ()
    _check_token_ids(bias, model, "logit_bias")
    _check_token_ids(allowed, model, "allowed_token_ids")
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
        allowed_token_ids=tuple(allowed),
        bad_token_sequences=bad_token_sequences,
    )


def _stopping(
    request: GenerationFields, model: ModelInfo, default_max_tokens: int | None
) -> StoppingCriteria:
    max_tokens = _max_tokens(request, default_max_tokens)
    if request.min_tokens and max_tokens is not None and request.min_tokens > max_tokens:
        raise invalid("min_tokens", f"is more than max_tokens ({max_tokens})")
    stop_token_ids = tuple(dict.fromkeys(request.stop_token_ids or ()))
    _check_token_ids(stop_token_ids, model, "stop_token_ids")
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
