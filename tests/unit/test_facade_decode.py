"""Every field has a decision, and every refusal names its field."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from http_facade.decisions import IGNORED, REFUSED
from http_facade.decode import CHAT, COMPLETIONS, Endpoint, decode_request, ignored_header
from http_facade.errors import ApiError
from http_facade.schema import ChatRequest, CompletionRequest

USER = {"role": "user", "content": "Hi"}
STARTS: dict[Any, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [USER]},
    COMPLETIONS: {"model": "m", "prompt": "Hi"},
}
BOTH = pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS], ids=["chat", "completions"])


def decode(endpoint: Endpoint[Any], /, **fields: Any) -> tuple[Any, Any]:
    return _decode(endpoint, fields, strict=False)


def _decode(endpoint: Endpoint[Any], fields: dict[str, Any], *, strict: bool) -> tuple[Any, Any]:
    decoded = decode_request({**STARTS[endpoint], **fields}, endpoint, strict=strict)
    return decoded.request, decoded.ignored


def refusal(endpoint: Endpoint[Any], /, **fields: Any) -> ApiError:
    return _refusal(endpoint, fields, strict=False)


def _refusal(endpoint: Endpoint[Any], fields: dict[str, Any], *, strict: bool) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _decode(endpoint, fields, strict=strict)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("endpoint", "params"),
    [
        (CHAT, chat_create_params.CompletionCreateParamsStreaming),
        (COMPLETIONS, completion_create_params.CompletionCreateParamsStreaming),
    ],
    ids=["chat", "completions"],
)
def test_every_field_of_the_sdk_has_a_decision(endpoint: Endpoint[Any], params: type) -> None:
    decided = {*endpoint.request_type.__struct_fields__, *IGNORED, *REFUSED}
    assert set(get_type_hints(params)) <= decided


def test_a_field_has_one_decision() -> None:
    honoured = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert not honoured & IGNORED.keys()
    assert not honoured & REFUSED.keys()
    assert not IGNORED.keys() & REFUSED.keys()


@BOTH
@pytest.mark.parametrize("field", sorted(IGNORED))
def test_ignored_fields_are_named(endpoint: Endpoint[Any], field: str) -> None:
    assert _decode(endpoint, {field: "anything"}, strict=True)[1] == (field,)


@BOTH
@pytest.mark.parametrize("field", sorted(REFUSED))
def test_refused_fields_are_named_and_their_neutral_values_taken(
    endpoint: Endpoint[Any], field: str
) -> None:
    assert refusal(endpoint, **{field: {"some": "thing"}}).param == field
    assert _decode(endpoint, {field: None}, strict=True)[1] == ()
    for neutral in REFUSED[field].neutral:
        assert _decode(endpoint, {field: neutral}, strict=True)[1] in ((), (field,))


def test_store_false_is_named_and_store_true_refused() -> None:
    assert decode(CHAT, store=False)[1] == ("store",)
    assert refusal(CHAT, store=True).param == "store"


@BOTH
def test_unknown_fields_are_named_or_refused_when_strict(endpoint: Endpoint[Any]) -> None:
    assert decode(endpoint, no_such=1)[1] == ("no_such",)
    assert decode(endpoint, no_such=None)[1] == ()
    assert _refusal(endpoint, {"no_such": 1}, strict=True).param == "no_such"


def test_unknown_nested_fields_are_named_or_refused_when_strict() -> None:
    fields: dict[str, Any] = {
        "messages": [{**USER, "weight": 1, "refusal": None}],
        "stream": True,
        "stream_options": {"include_obfuscation": False},
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "extra": 1}},
        "structured_outputs": {"whitespace_pattern": " "},
        "tools": [{"type": "function", "cache": 1, "function": {"name": "f", "examples": []}}],
    }
    assert set(decode(CHAT, **fields)[1]) == {
        "messages[0].weight",
        "stream_options.include_obfuscation",
        "response_format.json_schema.extra",
        "structured_outputs.whitespace_pattern",
        "tools[0].cache",
        "tools[0].function.examples",
    }
    strict = _refusal(CHAT, {"messages": fields["messages"]}, strict=True)
    assert strict.param == "messages[0].weight"


def test_fields_of_the_other_endpoint_are_refused_unless_they_say_nothing() -> None:
    assert refusal(CHAT, echo=True).param == "echo"
    assert decode(CHAT, echo=False)[1] == ()
    assert refusal(COMPLETIONS, messages=[USER]).param == "messages"
    assert refusal(COMPLETIONS, top_logprobs=1).param == "top_logprobs"
    assert decode(COMPLETIONS, continue_final_message=False)[1] == ()


@BOTH
def test_null_is_absent(endpoint: Endpoint[Any]) -> None:
    optional = set(endpoint.request_type.__struct_fields__) - STARTS[endpoint].keys()
    assert decode(endpoint, **dict.fromkeys(optional))[0] == decode(endpoint)[0]
    for required in STARTS[endpoint]:
        error = refusal(endpoint, **{required: None})
        assert (error.param, error.code) == (required, "missing_required_parameter")


@BOTH
@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, "0.5", True, [1]]),
        ("top_p", [0, -1, 1.1, "1"]),
        ("top_k", [-2, 1.5, True]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [2.1, -2.1]),
        ("frequency_penalty", [2.1, -2.1]),
        ("repetition_penalty", [0, -1, 1e-40, 0.03, 10.1]),
        ("max_tokens", [-1, 1.5, "8", True, 2**31]),
        ("max_completion_tokens", [0, -1, 1.0]),
        ("min_tokens", [-1, 0.5]),
        ("n", [0, -1, 129, 10**6, "1", 10**30]),
        ("seed", [2**63, -(2**63) - 1, "1", 0.5]),
        ("logit_bias", [{"x": 1}, {"5": 101}, {"5": "1"}, {"-1": 1}, [1]]),
        ("stop", [7, [7], {}]),
        ("stop_token_ids", [[-1], ["1"], 1, [True], [1] * 1025]),
        ("allowed_token_ids", [[], [-1], ["1"], 1]),
        ("bad_words", ["word", [""], [1], ["x"] * 129, ["x" * 201]]),
        ("prompt_logprobs", [-1, 21, True, 1.5]),
        ("return_token_ids", [1, "true"]),
        ("truncate_prompt_tokens", [-2, 1.5, 2**31]),
        ("stream", ["yes", 1]),
        ("stream_options", [True, []]),
        ("ignore_eos", [1, "true"]),
        ("response_format", ["json", 7, {"type": "xml"}, {}]),
        ("cache_salt", ["", 7, "x" * 513]),
        ("priority", [2**31, "1"]),
        ("user", [7]),
    ],
)
def test_wrong_values_are_named(endpoint: Endpoint[Any], field: str, values: list[Any]) -> None:
    for value in values:
        error = refusal(endpoint, **{field: value})
        assert error.param is not None
        assert error.param.split(".")[0].split("[")[0] == field, value
        assert error.message.startswith(error.param)
        for word in ("str`", "`int`", "None", "dict", "msgspec"):
            assert word not in error.message, error.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([7], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 7}], "messages[0].role"),
        ([{"role": None, "content": "x"}], "messages[0].role"),
        ([USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([USER, {"role": "user", "content": ["bare"]}], "messages[1].content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function"),
    ],
)
def test_wrong_messages_are_named(messages: Any, param: str) -> None:
    assert refusal(CHAT, messages=messages).param == param


@pytest.mark.parametrize("prompt", [7, {}, [], [1.5], [True], [[1, "a"]], [None]])
def test_wrong_prompts_are_named(prompt: Any) -> None:
    error = refusal(COMPLETIONS, prompt=prompt)
    assert error.param is not None and error.param.startswith("prompt")


@pytest.mark.parametrize("body", [[], "x", 7, None, True])
def test_a_body_is_an_object(body: object) -> None:
    with pytest.raises(ApiError, match="JSON object"):
        decode_request(body, CHAT, strict=False)


def test_names_from_the_caller_are_made_safe_for_a_header() -> None:
    assert ignored_header(("a", "b.c[0]")) == "a, b.c[0]"
    assert ignored_header(("x\r\nset-cookie: a",)) == "x%0D%0Aset-cookie%3A%20a"
    assert ignored_header(("ключ",)).isascii()
    many = ignored_header(tuple(f"field_{i}" for i in range(1000)))
    assert len(many) < 1100
    assert many.endswith(f"and {1000 - many.count('field_')} more")
