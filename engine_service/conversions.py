"""From protobuf to the core's messages and back; every field a caller sends is checked here.

What passes is resolved: defaults applied (the caller's value, else the model's generation config,
else off), max_tokens clamped, a seed drawn. What doesn't raises an EngineError naming the field
by its path, as `sampling.temperature`.
"""

from __future__ import annotations

import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from engine_service.cache_salt import effective_cache_salt
from engine_service.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    ModelNotFound,
    TokenizerStale,
)
from engine_service.messages import (
    AddRequest,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.served_model import ServedModel
from protos import engine_pb2 as pb

MAX_LOGPROBS: Final = 20
MAX_CACHE_SALT_BYTES: Final = 1024
MAX_TENANT_BYTES: Final = 256
MAX_LOGIT_BIAS: Final = 100.0
MIN_REPETITION_PENALTY: Final = 0.03125  # exact as a float; logits are divided by it
MAX_BAD_SEQUENCES: Final = 1024
MAX_BAD_SEQUENCE_TOKENS: Final = 128
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_KEPT_TRACES: Final = 256  # in one call

_REQUEST_ID: Final = re.compile(r"[!-~]{1,256}")  # printable ASCII without the space
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class _Range:
    """Of a number; NaN and infinities are never inside."""

    low: float
    high: float
    includes_low: bool = True

    def __contains__(self, value: float) -> bool:
        above = value >= self.low if self.includes_low else value > self.low
        return above and value <= self.high and math.isfinite(value)

    def __str__(self) -> str:
        return f"{'[' if self.includes_low else '('}{self.low:g}, {self.high:g}]"


# ---------------------------------------------------------------- the request


def check_request_id(request_id: str) -> None:
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest(
            "must be 1 to 256 printable ASCII characters without spaces", field="request_id"
        )


def check_trace_ids(request: pb.KeepTracesRequest) -> None:
    if len(request.trace_ids) > MAX_KEPT_TRACES:
        raise InvalidRequest(f"has more than {MAX_KEPT_TRACES} ids", field="trace_ids")
    for trace_id in request.trace_ids:
        if not _TRACE_ID.fullmatch(trace_id):
            raise InvalidRequest("must be 32 hexadecimal digits each", field="trace_ids")


def check_target(request: pb.GenerateRequest, model: ServedModel) -> None:
    """Whether the request is meant for this model and was made with its tokenizer."""
    if request.model and request.model != model.name:
        raise ModelNotFound(f"the model {request.model!r} is not served here", field="model")
    if request.tokenizer_digest and request.tokenizer_digest != model.tokenizer_digest:
        raise TokenizerStale(
            "the token ids were made by another tokenizer than this model's",
            field="tokenizer_digest",
        )


def check_prompt_length(num_tokens: int, model: ServedModel) -> None:
    if num_tokens == 0:
        raise InvalidRequest("the prompt has no tokens", field="prompt")
    if num_tokens >= model.max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {num_tokens} tokens, which leaves no room for one more in the"
            f" context of {model.max_model_len} tokens",
            field="prompt",
        )


def read_token_ids(request: pb.GenerateRequest, model: ServedModel) -> list[int]:
    """The prompt given as token ids."""
    check_prompt_length(len(request.token_ids.ids), model)
    token_ids = list(request.token_ids.ids)
    if max(token_ids) >= model.vocab_size:
        raise InvalidRequest(_not_a_token(max(token_ids), model), field="token_ids.ids")
    return token_ids


def to_add_request(
    request: pb.GenerateRequest,
    request_id: str,
    prompt_token_ids: list[int],
    model: ServedModel,
    arrival_ns: int,
    deadline_ns: int = 0,
    structured_output: StructuredOutput | None = None,
) -> AddRequest:
    """`prompt_token_ids` and `structured_output` are checked already (see `constraint.py`);
    `deadline_ns` 0: there is none."""
    n = request.sampling.n if request.sampling.HasField("n") else 1
    _check(n, _Range(1, model.max_samples), "sampling.n")
    if len(request.kv.cache_salt.encode()) > MAX_CACHE_SALT_BYTES:
        raise InvalidRequest(f"is longer than {MAX_CACHE_SALT_BYTES} bytes", field="kv.cache_salt")
    if len(request.tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest(f"is longer than {MAX_TENANT_BYTES} bytes", field="tenant")
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        sampling=_sampling(request, model),
        stopping=_stopping(request.stopping, len(prompt_token_ids), model),
        structured_output=structured_output,
        n=n,
        priority=min(max(request.priority, -model.priority_range), model.priority_range),
        tenant=request.tenant,
        cache_salt=effective_cache_salt(request.tenant, request.kv.cache_salt),
        arrival_ns=arrival_ns,
        deadline_ns=deadline_ns,
        tells_timing=request.response.timing,
    )


def _sampling(request: pb.GenerateRequest, model: ServedModel) -> SamplingParams:
    given, defaults = request.sampling, model.defaults

    def choose(name: str, default: float | None, off: float, allowed: _Range) -> float:
        if given.HasField(name):  # type: ignore[arg-type]  # a name of this message's fields
            value: float = getattr(given, name)
            return _check(value, allowed, f"sampling.{name}")
        return off if default is None else default

    repetition_range = _Range(MIN_REPETITION_PENALTY, 10)
    return SamplingParams(
        temperature=choose("temperature", defaults.temperature, 1.0, _Range(0, 2)),
        top_p=choose("top_p", defaults.top_p, 1.0, _Range(0, 1, includes_low=False)),
        top_k=_top_k(given, defaults.top_k),
        min_p=choose("min_p", defaults.min_p, 0.0, _Range(0, 1)),
        repetition_penalty=choose(
            "repetition_penalty", defaults.repetition_penalty, 1.0, repetition_range
        ),
        presence_penalty=choose("presence_penalty", None, 0.0, _Range(-2, 2)),
        frequency_penalty=choose("frequency_penalty", None, 0.0, _Range(-2, 2)),
        logit_bias=_logit_bias(given, model),
        seed=given.seed if given.HasField("seed") else secrets.randbits(64),
        num_logprobs=_num_logprobs(request.response, "logprobs"),
        num_prompt_logprobs=_num_logprobs(request.response, "prompt_logprobs"),
        allowed_token_ids=_token_ids(given.allowed_token_ids, model, "sampling.allowed_token_ids"),
        bad_token_sequences=_bad_token_sequences(given, model),
    )


def _top_k(given: pb.SamplingParams, default: int | None) -> int:
    top_k = given.top_k if given.HasField("top_k") else (default or 0)
    if top_k < -1:
        raise InvalidRequest("must be positive, or -1 or 0 for off", field="sampling.top_k")
    return max(top_k, 0)


def _logit_bias(given: pb.SamplingParams, model: ServedModel) -> dict[int, float]:
    field = "sampling.logit_bias"
    for token_id, bias in given.logit_bias.items():
        if token_id >= model.vocab_size:
            raise InvalidRequest(_not_a_token(token_id, model), field=field)
        _check(bias, _Range(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS), field)
    return dict(given.logit_bias)


def _num_logprobs(
    response: pb.ResponseOptions, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    if not response.HasField(name):
        return None
    number: int = getattr(response, name)
    _check(number, _Range(0, MAX_LOGPROBS), f"response.{name}")
    return number


def _token_ids(given: Iterable[int], model: ServedModel, field: str) -> tuple[int, ...]:
    """Each once, in the order given."""
    token_ids = tuple(dict.fromkeys(given))
    if token_ids and max(token_ids) >= model.vocab_size:
        raise InvalidRequest(_not_a_token(max(token_ids), model), field=field)
    return token_ids


def _bad_token_sequences(
    given: pb.SamplingParams, model: ServedModel
) -> tuple[tuple[int, ...], ...]:
    field = "sampling.bad_token_sequences"
    if len(given.bad_token_sequences) > MAX_BAD_SEQUENCES:
        raise InvalidRequest(f"has more than {MAX_BAD_SEQUENCES} sequences", field=field)
    sequences = tuple(dict.fromkeys(tuple(item.ids) for item in given.bad_token_sequences))
    for token_ids in sequences:
        if not 1 <= len(token_ids) <= MAX_BAD_SEQUENCE_TOKENS:
            raise InvalidRequest(
                f"each has 1 to {MAX_BAD_SEQUENCE_TOKENS} tokens, not {len(token_ids)}",
                field=field,
            )
        _token_ids(token_ids, model, field)
    return sequences


def _stopping(
    given: pb.StoppingCriteria, num_prompt_tokens: int, model: ServedModel
) -> StoppingCriteria:
    if given.HasField("max_tokens") and given.max_tokens < 1:
        raise InvalidRequest("must be at least 1", field="stopping.max_tokens")
    if given.HasField("max_tokens") and given.min_tokens > given.max_tokens:
        raise InvalidRequest("is more than max_tokens", field="stopping.min_tokens")
    if len(given.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"has more than {MAX_STOP_TOKEN_IDS} token ids", field="stopping.stop_token_ids"
        )
    room = min(model.max_model_len - num_prompt_tokens, model.max_output_tokens)
    max_tokens = min(given.max_tokens, room) if given.HasField("max_tokens") else room
    return StoppingCriteria(
        max_tokens=max_tokens,
        min_tokens=min(given.min_tokens, max_tokens),
        stop_token_ids=_token_ids(given.stop_token_ids, model, "stopping.stop_token_ids"),
        eos_token_ids=() if given.ignore_eos else model.eos_token_ids,
    )


def _check(value: float, allowed: _Range, field: str) -> float:
    if value not in allowed:
        raise InvalidRequest(f"must be within {allowed}, not {value:g}", field=field)
    return value


def _not_a_token(token_id: int, model: ServedModel) -> str:
    return f"{token_id} is not a token id; the vocabulary has {model.vocab_size}"
