"""Every field of GenerateRequest: what is refused, by which path, and what the rest becomes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import pytest

from engine_service.cache_salt import effective_cache_salt
from engine_service.config import ModelConfig
from engine_service.conversions import (
    check_prompt_length,
    check_request_id,
    check_target,
    read_token_ids,
    to_add_request,
)
from engine_service.errors import (
    ContextLengthExceeded,
    EngineError,
    InvalidRequest,
    ModelNotFound,
    TokenizerStale,
)
from engine_service.messages import AddRequest
from engine_service.model_error import ModelError
from engine_service.served_model import (
    GenerationDefaults,
    ServedModel,
    read_generation_defaults,
    sampling_defaults,
)
from engine_service.tokenizer_files import TokenizerFiles
from protos import engine_pb2 as pb

MODEL = ServedModel(
    name="tiny",
    vocab_size=100,
    max_model_len=50,
    eos_token_ids=(2, 3),
    tokenizer_digest="d1",
    defaults=GenerationDefaults(),
    max_output_tokens=30,
    max_samples=8,
    priority_range=10,
)

Change = Callable[[pb.GenerateRequest], object]


def convert(
    change: Change = lambda request: None, prompt_tokens: int = 10, model: ServedModel = MODEL
) -> AddRequest:
    request = pb.GenerateRequest()
    change(request)
    return to_add_request(request, "r", list(range(prompt_tokens)), model, arrival_ns=7)


def setting(path: str, value: float) -> Change:
    group, name = path.split(".")
    return lambda request: setattr(getattr(request, group), name, value)


# ---------------------------------------------------------------- refused

OUT_OF_RANGE: dict[str, tuple[float, ...]] = {
    "sampling.temperature": (-0.1, 2.1, math.nan, math.inf, -math.inf),
    "sampling.top_p": (0, -0.5, 1.1, math.nan),
    "sampling.top_k": (-2, -(2**31)),
    "sampling.min_p": (-0.1, 1.1, math.nan),
    "sampling.repetition_penalty": (0, -1, 1e-40, 0.03, 10.5, math.nan, math.inf),
    "sampling.presence_penalty": (-2.1, 2.1, math.nan),
    "sampling.frequency_penalty": (-2.1, 2.1, math.nan),
    "sampling.n": (0, 9, 2**32 - 1),
    "stopping.max_tokens": (0,),
    "response.logprobs": (21, 2**32 - 1),
    "response.prompt_logprobs": (21, 2**32 - 1),
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in OUT_OF_RANGE.items() for value in values]
)
def test_numbers_out_of_range_name_their_field(path: str, value: float) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(setting(path, value))
    assert caught.value.field == path


IN_RANGE: dict[str, tuple[float, ...]] = {
    "sampling.temperature": (0, 2, 1e-6),
    "sampling.top_p": (1, 1e-9),
    "sampling.top_k": (-1, 0, 1, 2**31 - 1),
    "sampling.min_p": (0, 1),
    "sampling.repetition_penalty": (0.03125, 10),
    "sampling.presence_penalty": (-2, 2),
    "sampling.frequency_penalty": (-2, 2),
    "sampling.seed": (0, 2**64 - 1),
    "sampling.n": (1, 8),
    "stopping.max_tokens": (1, 2**32 - 1),
    "response.logprobs": (0, 20),
    "response.prompt_logprobs": (0, 20),
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, values in IN_RANGE.items() for value in values]
)
def test_the_ends_of_each_range_pass(path: str, value: float) -> None:
    convert(setting(path, value))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("sampling.logit_bias", lambda r: r.sampling.logit_bias.update({100: 1.0})),
        ("sampling.logit_bias", lambda r: r.sampling.logit_bias.update({5: 100.5})),
        ("sampling.logit_bias", lambda r: r.sampling.logit_bias.update({5: math.nan})),
        ("stopping.stop_token_ids", lambda r: r.stopping.stop_token_ids.extend([1, 100])),
        ("stopping.stop_token_ids", lambda r: r.stopping.stop_token_ids.extend([1] * 1025)),
        ("sampling.allowed_token_ids", lambda r: r.sampling.allowed_token_ids.extend([1, 100])),
        (
            "sampling.bad_token_sequences",
            lambda r: r.sampling.bad_token_sequences.add().ids.extend([1, 100]),
        ),
        ("sampling.bad_token_sequences", lambda r: r.sampling.bad_token_sequences.add()),
        (
            "sampling.bad_token_sequences",
            lambda r: r.sampling.bad_token_sequences.add().ids.extend([1] * 129),
        ),
        (
            "sampling.bad_token_sequences",
            lambda r: [r.sampling.bad_token_sequences.add() for _ in range(1025)],
        ),
        (
            "stopping.min_tokens",
            lambda r: (setting("stopping.max_tokens", 3)(r), setting("stopping.min_tokens", 4)(r)),
        ),
        ("kv.cache_salt", lambda r: setattr(r.kv, "cache_salt", "é" * 513)),
        ("tenant", lambda r: setattr(r, "tenant", "t" * 257)),
    ],
)
def test_other_bad_fields_are_named(field: str, change: Change) -> None:
    with pytest.raises(InvalidRequest) as caught:
        convert(change)
    assert caught.value.field == field


@pytest.mark.parametrize("request_id", ["", "a b", "a\n", "é", "x" * 257, "\x7f"])
def test_bad_request_ids(request_id: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_request_id(request_id)
    assert caught.value.field == "request_id"


@pytest.mark.parametrize("request_id", ["a", "chatcmpl-1/2:3#~!", "x" * 256])
def test_good_request_ids(request_id: str) -> None:
    check_request_id(request_id)


@pytest.mark.parametrize(
    ("num_tokens", "error"),
    [(0, InvalidRequest), (50, ContextLengthExceeded), (51, ContextLengthExceeded)],
)
def test_prompts_without_tokens_or_room(num_tokens: int, error: type[EngineError]) -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * num_tokens))
    with pytest.raises(error) as caught:
        read_token_ids(request, MODEL)
    assert caught.value.field == "prompt"
    if error is ContextLengthExceeded:
        assert str(num_tokens) in caught.value.message
        assert "50" in caught.value.message


def test_a_prompt_that_leaves_room_for_one_token() -> None:
    check_prompt_length(49, MODEL)
    assert convert(prompt_tokens=49).stopping.max_tokens == 1


def test_token_ids_outside_the_vocabulary() -> None:
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 100, 2]))
    with pytest.raises(InvalidRequest, match="100") as caught:
        read_token_ids(request, MODEL)
    assert caught.value.field == "token_ids.ids"


def test_the_wrong_model_and_a_stale_tokenizer() -> None:
    check_target(pb.GenerateRequest(), MODEL)
    check_target(pb.GenerateRequest(model="tiny", tokenizer_digest="d1"), MODEL)
    with pytest.raises(ModelNotFound):
        check_target(pb.GenerateRequest(model="other"), MODEL)
    with pytest.raises(TokenizerStale):
        check_target(pb.GenerateRequest(tokenizer_digest="d2"), MODEL)


# ---------------------------------------------------------------- resolved


def test_defaults_of_an_empty_request() -> None:
    request = convert()
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert sampling.repetition_penalty == 1
    assert sampling.presence_penalty == sampling.frequency_penalty == 0
    assert (sampling.logit_bias, sampling.num_logprobs) == ({}, None)
    assert request.stopping.max_tokens == 30  # the server's cap; 40 were left of the context
    assert (request.stopping.min_tokens, request.stopping.stop_token_ids) == (0, ())
    assert request.stopping.eos_token_ids == (2, 3)
    assert (request.n, request.priority, request.structured_output) == (1, 0, None)
    assert request.arrival_ns == 7


def test_an_absent_seed_is_drawn_anew() -> None:
    assert len({convert().sampling.seed for _ in range(8)}) == 8
    assert convert(setting("sampling.seed", 5)).sampling.seed == 5
    assert convert(setting("sampling.seed", 0)).sampling.seed == 0


def test_the_models_defaults_stand_in_for_absent_fields_only() -> None:
    defaults = GenerationDefaults(0.6, 0.9, 40, 0.05, 1.1)
    model = ServedModel("m", 100, 50, (2,), "d", defaults, 30, 8, 10)
    sampling = convert(model=model).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.9, 40)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.05, 1.1)

    def switch_off(request: pb.GenerateRequest) -> None:
        request.sampling.temperature = 0
        request.sampling.top_p = 1
        request.sampling.top_k = -1
        request.sampling.min_p = 0
        request.sampling.repetition_penalty = 1

    sampling = convert(switch_off, model=model).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0, 1, 0)
    assert (sampling.min_p, sampling.repetition_penalty) == (0, 1)


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "effective"), [(10, 5, 5), (10, 35, 30), (45, 35, 5), (45, None, 5)]
)
def test_max_tokens_is_clamped_to_context_and_cap(
    prompt_tokens: int, asked: int | None, effective: int
) -> None:
    change: Change = setting("stopping.max_tokens", asked) if asked else (lambda request: None)
    assert convert(change, prompt_tokens).stopping.max_tokens == effective


def test_min_tokens_never_exceeds_what_max_tokens_became() -> None:
    stopping = convert(setting("stopping.min_tokens", 60)).stopping
    assert (stopping.min_tokens, stopping.max_tokens) == (30, 30)


def test_stopping_criteria() -> None:
    def change(request: pb.GenerateRequest) -> None:
        request.stopping.ignore_eos = True
        request.stopping.stop_token_ids.extend([9, 4, 9])

    stopping = convert(change).stopping
    assert (stopping.eos_token_ids, stopping.stop_token_ids) == ((), (9, 4))


def test_the_rest_is_passed_on() -> None:
    def change(request: pb.GenerateRequest) -> None:
        request.priority = -3
        request.tenant = "t"
        request.kv.cache_salt = "é" * 512
        request.sampling.n = 4
        request.sampling.logit_bias[5] = -100
        request.response.logprobs = 0

    request = convert(change)
    assert (request.priority, request.tenant, request.n) == (-3, "t", 4)
    assert request.cache_salt == effective_cache_salt("t", "é" * 512)
    assert request.sampling.logit_bias == {5: -100}
    assert request.sampling.num_logprobs == 0


@pytest.mark.parametrize(
    ("asked", "effective"), [(-(2**31), -10), (-11, -10), (-10, -10), (0, 0), (11, 10)]
)
def test_a_priority_is_clamped_to_the_servers_range(asked: int, effective: int) -> None:
    assert convert(lambda r: setattr(r, "priority", asked)).priority == effective


def test_the_tenant_is_part_of_the_salt_and_no_salt_leaves_its_tenant() -> None:
    assert effective_cache_salt("", "") == ""  # what all share
    salts = [
        effective_cache_salt(tenant, salt)
        for tenant in ("", "a", "ab", "é", effective_cache_salt("a", ""))
        for salt in ("", "a", "b", "bc", "é", effective_cache_salt("a", "b"))
    ]
    assert len(set(salts)) == len(salts)
    assert effective_cache_salt("a", "b") == effective_cache_salt("a", "b")


# ---------------------------------------------------------------- generation_config.json


def test_generation_config() -> None:
    content = b'{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "top_p": null}'
    assert read_generation_defaults(content) == GenerationDefaults(temperature=0.6, top_k=20)
    assert read_generation_defaults(None) == GenerationDefaults()


@pytest.mark.parametrize("choice", ["vllm", "none"])
def test_sampling_defaults_can_be_neutral_whatever_the_model_says(choice: str) -> None:
    files = TokenizerFiles({"generation_config.json": b'{"temperature": 0.6}'})
    config = ModelConfig("", "")
    assert sampling_defaults(config, files) == GenerationDefaults(temperature=0.6)
    neutral = msgspec.structs.replace(config, generation_config=choice)
    assert sampling_defaults(neutral, files) == GenerationDefaults()


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"temperature": "hot"}', b'{"top_k": true}', b'{"top_p": NaN}']
)
def test_broken_generation_configs(content: bytes) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        read_generation_defaults(content)


def test_token_constraints_are_taken_once_each() -> None:
    def change(request: pb.GenerateRequest) -> None:
        request.sampling.allowed_token_ids.extend([7, 5, 7])
        for token_ids in ([1, 2], [3], [1, 2]):
            request.sampling.bad_token_sequences.add().ids.extend(token_ids)
        request.response.prompt_logprobs = 0

    sampling = convert(change).sampling
    assert sampling.allowed_token_ids == (7, 5)
    assert sampling.bad_token_sequences == ((1, 2), (3,))
    assert sampling.num_prompt_logprobs == 0
    assert convert().sampling.num_prompt_logprobs is None
