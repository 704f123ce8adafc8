"""Streamed text equals the text decoded at once, at every prefix, for any ids whatever."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.text import Detokenizer, Tokenizer
from tests.text_samples import (
    NUM_BYTE_TOKENS,
    byte_level_backend,
    embedded_backend,
    embedded_tokenizer,
    fallback_backend,
    metaspace_backend,
    token_id_of,
)

SMALL_BACKENDS = {
    "byte_level": byte_level_backend(),
    "fallback": fallback_backend(strip=False),
    "fallback_strip": fallback_backend(strip=True),
    "metaspace": metaspace_backend(),
}
SMALL = {name: Tokenizer(backend) for name, backend in SMALL_BACKENDS.items()}

# The embedded model's vocabulary lacks some bytes; characters with those do not survive encoding.
KNOWN_TO_EMBEDDED = st.characters(
    max_codepoint=0x3FFFF,
    exclude_categories=["Cs"],
    exclude_characters="\x04\x06\x13\x14\x16\x1d",
)

# UTF-8's lead and continuation bytes are frequent, so that characters begin, go on and break off.
utf8ish_bytes = st.one_of(
    st.sampled_from([0x41, 0x20, 0xC3, 0xA9, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0x8C, 0xB6, 0xED, 0xFF]),
    st.integers(0, 255),
)


@pytest.fixture(scope="module")
def embedded(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


@pytest.fixture(scope="module")
def embedded_library(embedded_model_dir: Path) -> tokenizers.Tokenizer:
    return embedded_backend(embedded_model_dir)


def check_every_prefix(tokenizer: Tokenizer, ids: list[int], *, skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    text = ""
    for count, token_id in enumerate(ids, start=1):
        text += detokenizer.push(token_id)
        at_once = Detokenizer(tokenizer, skip_special_tokens=skip)
        ended_here = "".join(map(at_once.push, ids[:count])) + at_once.finish()
        unfinished = ended_here.removeprefix(text)
        assert ended_here == text + unfinished  # what was sent stays
        assert unfinished in (("\ufffd", "\ufffd" * 2) if detokenizer.in_character else ("",))
        # Decoding a text of its own takes off the space that encoding puts before it.
        whole = tokenizer.decode(ids[:count], skip_special_tokens=skip)
        assert ended_here in (whole, " " + whole)


@settings(max_examples=150)
@given(ids=st.lists(st.integers(0, 49_151), max_size=25), skip=st.booleans())
def test_random_ids_of_the_embedded_tokenizer(
    embedded: Tokenizer, embedded_library: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    check_every_prefix(embedded, ids, skip=skip)
    assert embedded.decode(ids, skip_special_tokens=skip) == embedded_library.decode(
        ids, skip_special_tokens=skip
    )


@settings(max_examples=150)
@given(text=st.text(alphabet=KNOWN_TO_EMBEDDED, max_size=40))
def test_a_text_comes_back_from_its_tokens(embedded: Tokenizer, text: str) -> None:
    ids = embedded.encode(text)
    detokenizer = Detokenizer(embedded)
    assert "".join(map(detokenizer.push, ids)) == text
    assert detokenizer.finish() == ""
    assert b"".join(map(embedded.token_bytes, ids)) == text.encode()


@pytest.mark.parametrize("name", sorted(SMALL))
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_of_small_tokenizers(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = SMALL[name]
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(st.one_of(any_id, utf8ish_bytes), max_size=25))
    check_every_prefix(tokenizer, ids, skip=skip)


@settings(max_examples=150)
@given(chunks=st.lists(utf8ish_bytes, max_size=25))
def test_byte_level_decoding_equals_the_library_on_invalid_bytes(chunks: list[int]) -> None:
    letters = {
        SMALL["byte_level"].token_bytes(token_id): token_id
        for token_id in range(SMALL["byte_level"].vocab_size)
    }
    ids = [letters[bytes([byte])] for byte in chunks]
    assert SMALL["byte_level"].decode(ids) == SMALL_BACKENDS["byte_level"].decode(ids)


@pytest.mark.parametrize("name", ["fallback", "fallback_strip"])
@settings(max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_byte_fallback_decoding_equals_the_library_on_whole_characters(
    name: str, data: st.DataObject, skip: bool
) -> None:
    tokenizer = SMALL[name]
    word = st.integers(NUM_BYTE_TOKENS, tokenizer.vocab_size - 1).map(lambda token_id: [token_id])
    character = st.characters(exclude_categories=["Cs"]).map(lambda text: list(text.encode()))
    drawn = data.draw(st.lists(st.one_of(word, character), max_size=12))
    ids = [token_id for part in drawn for token_id in part]
    assert tokenizer.decode(ids, skip_special_tokens=skip) == SMALL_BACKENDS[name].decode(
        ids, skip_special_tokens=skip
    )


@pytest.mark.parametrize("name", ["fallback", "fallback_strip", "metaspace"])
@settings(max_examples=100)
@given(data=st.data())
def test_the_text_goes_on_from_its_prompt(name: str, data: st.DataObject) -> None:
    tokenizer = SMALL[name]
    first = [token_id_of(SMALL_BACKENDS[name], "▁Hello")]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    detokenizer = Detokenizer(tokenizer)
    text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
    assert tokenizer.decode(first) + text == tokenizer.decode(first + ids)
