"""Checks that need more than one field, or the model's limits, and what the engine is asked for."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from clients.testing import FakeEngine
from clients.text.tool_parsers import TOOL_FORMATS
from clients.types import SamplingParams, StructuredOutput
from http_facade.decode import CHAT, COMPLETIONS, decode_request
from http_facade.errors import ApiError
from http_facade.params import GenerationPlan, plan_chat, plan_completion

MODEL = dataclasses.replace(FakeEngine().model_info, vocab_size=1000, max_samples=8)


def chat(**fields: Any) -> GenerationPlan:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = decode_request(body, CHAT, strict=False).request
    return plan_chat(request, MODEL, tool_format=TOOL_FORMATS["hermes"], max_stop_strings=4)


def completion(**fields: Any) -> GenerationPlan:
    body = {"model": "m", "prompt": "Hi", **fields}
    request = decode_request(body, COMPLETIONS, strict=False).request
    return plan_completion(request, MODEL, max_stop_strings=4)


@pytest.mark.parametrize("plan", [chat, completion])
@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("best_of", {"n": 2, "best_of": 3}),
        ("n", {"n": 9}),
        ("max_tokens", {"max_tokens": 10, "max_completion_tokens": 3}),
        ("min_tokens", {"max_tokens": 3, "min_tokens": 4}),
        ("logit_bias", {"logit_bias": {"1000": 1}}),
        ("stop_token_ids", {"stop_token_ids": [1000]}),
        ("stop", {"stop": ""}),
        ("stop[1]", {"stop": ["a", ""]}),
        ("stop", {"stop": ["x"] * 10_000}),
        ("stop", {"stop": "x" * 1_000_000}),
        ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
        (
            "response_format.json_schema",
            {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        ),
    ],
)
def test_contradictions_are_named(plan: Any, param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        plan(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("top_logprobs", {"top_logprobs": 2}),
        ("top_logprobs", {"top_logprobs": 0, "logprobs": False}),
        (
            "continue_final_message",
            {"continue_final_message": True, "add_generation_prompt": True},
        ),
    ],
)
def test_contradictions_of_chat_are_named(param: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    plan = completion(echo=True, logprobs=2)
    assert (plan.num_logprobs, plan.num_prompt_logprobs) == (2, 2)
    assert completion(logprobs=2).num_prompt_logprobs is None
    assert completion(echo=True).num_prompt_logprobs is None
    both = completion(echo=True, logprobs=0, prompt_logprobs=7)
    assert (both.answer.num_echo_logprobs, both.answer.num_prompt_logprobs) == (0, 7)
    assert both.num_prompt_logprobs == 7
    assert chat(prompt_logprobs=0).num_prompt_logprobs == 0


def test_no_tokens_at_all_are_for_an_echo() -> None:
    plan = completion(max_tokens=0, echo=True)
    assert plan.text.prompt_only and plan.stopping.max_tokens == 1  # the engine knows no zero
    assert not completion(max_tokens=1, echo=True).text.prompt_only
    with pytest.raises(ApiError) as caught:
        completion(max_tokens=0)
    assert caught.value.param == "max_tokens"


def test_token_constraints_reach_the_engine() -> None:
    for plan in (chat, completion):
        sampling = plan(allowed_token_ids=[5, 999]).sampling
        assert tuple(sampling.allowed_token_ids) == (5, 999)
        with pytest.raises(ApiError) as caught:
            plan(allowed_token_ids=[1000])
        assert caught.value.param == "allowed_token_ids"


def test_limits_of_tokens_have_two_names_and_one_default_per_endpoint() -> None:
    assert chat().stopping.max_tokens is None  # what is left of the context
    assert completion().stopping.max_tokens == 16
    for plan in (chat, completion):
        assert plan(max_tokens=3).stopping.max_tokens == 3
        assert plan(max_completion_tokens=3).stopping.max_tokens == 3
        assert plan(max_completion_tokens=3, max_tokens=3).stopping.max_tokens == 3


def test_logprobs_of_both_endpoints() -> None:
    assert chat().num_logprobs is completion().num_logprobs is None
    assert chat(logprobs=True).num_logprobs == completion(logprobs=0).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    assert completion(logprobs=5).num_logprobs == 5
    assert completion(logprobs=0).text.want_logprobs


def test_what_is_given_reaches_the_engine_and_what_is_not_stays_the_models() -> None:
    assert chat().sampling == SamplingParams(n=1)
    plan = chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"5": 100, "6": -100},
        seed=42,
        n=3,
    )
    assert plan.sampling == SamplingParams(
        0.5, 0.9, 40, 0.1, 1.1, 1.0, -1.0, {5: 100.0, 6: -100.0}, 42, 3
    )


def test_extreme_numbers_fit_the_wire() -> None:
    assert chat(top_k=10**9 * 10**6).sampling.top_k == 2**31 - 1
    assert chat(seed=-1).sampling.seed == 2**64 - 1
    assert chat(max_tokens=10**9).stopping.max_tokens == 10**9


def test_stop_strings() -> None:
    assert chat(stop="a").text.stop == ("a",)
    assert chat(stop=["a", "b", "a"]).text.stop == ("a", "b")
    assert chat(stop=[]).text.stop == chat().text.stop == ()


def test_response_formats() -> None:
    def given(response_format: dict[str, Any]) -> StructuredOutput | None:
        constraint = chat(response_format=response_format).constraint
        return constraint.output if constraint else None

    assert given({"type": "text"}) is None
    assert given({"type": "json_object"}) == StructuredOutput(json_object=True)
    schema = {"z": 1, "a": [True, None, 1.5, "é"]}  # passed on as it came, keys in order
    structured = given({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert structured is not None and structured.json_schema is not None
    assert list(json.loads(structured.json_schema).items()) == list(schema.items())
    assert given({"type": "json_schema", "json_schema": {"schema": {}}}) == StructuredOutput("{}")
