"""Bodies that are no JSON, or hold numbers that JSON can't: 400 that names the field."""

from __future__ import annotations

import json

import pytest

from http_facade.body import decode_json
from http_facade.errors import ApiError


def refusal(data: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_json(data)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("data", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"logit_bias": {"5": Infinity}}', "logit_bias.5"),
        (b'{"a": [1, {"b": 1e999}]}', "a[1].b"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
    ],
)
def test_a_number_that_json_cannot_hold_is_named(data: bytes, param: str) -> None:
    assert refusal(data).param == param


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  ",
        b"{",
        b'{"a" 1}',
        b'{"a": 1}}',
        b"\xff\xfe",
        b'{"a": "\xff"}',
    ],
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    assert refusal(data).code == "invalid_json"


@pytest.mark.parametrize(
    ("data", "param", "what"),
    [
        (b'{"prompt": "\\ud800"}', "prompt", "the text"),
        (b'{"prompt": ["a", "b\\udc00c"]}', "prompt[1]", "the text"),
        (b'{"a": [{"b": "\\ud800\\u0041"}]}', "a[0].b", "the text"),
        (b'"\\ud800"', None, "the text"),
        (b'{"a": {"\\ud800": 1}}', "a", "a name in it"),
        (b'{"\\ud800": NaN}', None, "a name in it"),
    ],
)
def test_a_lone_surrogate_is_called_one(data: bytes, param: str | None, what: str) -> None:
    error = refusal(data)
    assert (error.param, error.code) == (param, "invalid_json")
    assert f"{what} holds a lone surrogate" in error.message
    error.response()  # and the answer can be written


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_nesting_without_end_is_refused(opening: bytes) -> None:
    assert refusal(b'{"model": ' + opening * 100_000).code == "invalid_json"
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    assert refusal(opening * 100_000 + b"1" + closing * 100_000).code == "invalid_json"


def test_of_duplicate_keys_the_last_one_counts() -> None:
    assert decode_json(b'{"n": 1, "n": 2}') == {"n": 2}


@pytest.mark.parametrize(
    "data",
    [
        b'{"prompt": [' + b"[1]," * 300_000 + b"[1]]}",
        b'{"prompt": [' + b'"a",' * 900_000 + b'"a"]}',
        b'{"prompt": [' + b"1," * 4_000_001 + b"1]}",
        b"{" + b'"a":1,' * 900_000 + b'"a":1}',
        b'{"a": "' + rb"\\" * 5 + b'", "b": [' + b"{}," * 300_000 + b"{}]}",
        b"[" * 300_000,
    ],
)
def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("msgspec.json.decode", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(ApiError) as caught:
        decode_json(data)
    assert (caught.value.status, caught.value.code) == (413, "request_too_large")


@pytest.mark.parametrize("piece", ["[{", "{,", r"\"[", r"\"" * 10, r"\\[", r"\n{", r"\\\"{"])
def test_what_stands_in_a_text_is_no_value(piece: str) -> None:
    text = piece * 300_000
    assert decode_json(b'{"a": [1, "' + text.encode() + b'"]}') == {
        "a": [1, json.loads(f'"{text}"')]
    }


def test_of_a_long_body_no_field_is_looked_for() -> None:
    """It would take seconds, and memory for a path to each value."""
    error = refusal(b'{"prompt": [' + b"1," * 1_000_000 + b"NaN]}")
    assert (error.param, error.code) == (None, "invalid_json")
