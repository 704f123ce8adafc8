"""The public cases about text, at the level of one sample's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from clients.text import TextDelta, TextLayerError, TextStream, Tokenizer
from clients.types import TokenLogprobs
from tests.text_samples import HARD_TEXT, embedded_tokenizer, metaspace_backend, token_id_of

PLAIN = TokenLogprobs(logprob=-0.25, rank=1, top=())


@pytest.fixture(scope="module")
def tokenizer(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


@pytest.fixture(scope="module")
def eos(tokenizer: Tokenizer) -> int:
    return tokenizer.encode(tokenizer.special_tokens["eos_token"])[0]


def one_by_one(stream: TextStream, ids: Sequence[int]) -> list[TextDelta]:
    return [stream.push([token_id], [PLAIN]) for token_id in ids] + [stream.finish()]


def text_of(deltas: Sequence[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


# ---------------------------------------------------------------- D1, D5, D6, S5


def test_characters_split_over_tokens_and_a_cut_at_every_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD_TEXT)
    assert len(ids) > len(HARD_TEXT)  # characters are split
    for count in range(len(ids) + 1):
        deltas = one_by_one(TextStream(tokenizer), ids[:count])
        assert not any("\ufffd" in delta.text for delta in deltas[:-1])
        at_once = TextStream(tokenizer)
        whole = at_once.push(ids[:count]).text + at_once.finish().text
        assert text_of(deltas) == whole == tokenizer.decode(ids[:count])
        assert at_once.num_tokens == count
        # A cut character is shown as one U+FFFD, at the end only.
        assert whole.removesuffix("\ufffd") == HARD_TEXT[: len(whole.removesuffix("\ufffd"))]
    assert whole == HARD_TEXT


def test_entries_have_true_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HARD_TEXT)
    top = tuple((token_id, -1.0 - place) for place, token_id in enumerate(ids[:5]))
    stream = TextStream(tokenizer, want_logprobs=True)
    deltas = [stream.push([i], [TokenLogprobs(logprob=-0.5, rank=1, top=top)]) for i in ids]
    entries = [entry for delta in [*deltas, stream.finish()] for entry in delta.logprobs]
    assert [entry.token_id for entry in entries] == ids
    assert b"".join(entry.bytes for entry in entries) == HARD_TEXT.encode()
    for entry in entries:
        assert entry.logprob == -0.5
        assert not entry.hidden
        assert [alternative.token_id for alternative in entry.top] == ids[:5]
        assert [alternative.bytes for alternative in entry.top] == [
            tokenizer.token_bytes(token_id) for token_id in ids[:5]
        ]
        assert len({alternative.token for alternative in entry.top}) == len(set(ids[:5]))


def test_special_tokens_are_hidden_or_shown_with_nothing_between(
    tokenizer: Tokenizer, eos: int
) -> None:
    hidden = TextStream(tokenizer, want_logprobs=True)
    deltas = one_by_one(hidden, [eos] * 4)
    assert text_of(deltas) == ""
    assert hidden.num_tokens == 4
    assert [entry.hidden for delta in deltas for entry in delta.logprobs] == [True] * 4

    shown = TextStream(tokenizer, skip_special_tokens=False, hidden_token_ids=[eos])
    assert text_of(one_by_one(shown, [eos] * 4)) == "<|im_end|>" * 4
    assert shown.num_tokens == 4


def test_a_special_token_that_means_something_can_be_shown(tokenizer: Tokenizer, eos: int) -> None:
    marker = tokenizer.token_id("<reponame>")
    assert marker is not None and tokenizer.is_special(marker)
    stream = TextStream(tokenizer, shown_token_ids=[marker], want_logprobs=True)
    deltas = one_by_one(stream, [eos, marker, *tokenizer.encode("Hello"), eos])
    assert text_of(deltas) == "<reponame>Hello"
    hidden = [entry.hidden for delta in deltas for entry in delta.logprobs]
    assert hidden == [True, False, False, True]
    assert tokenizer.token_id("no such token") is None


def test_the_end_token_adds_no_text_even_if_it_is_a_word(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello world")
    stream = TextStream(tokenizer, hidden_token_ids=[ids[-1]], want_logprobs=True)
    deltas = one_by_one(stream, ids)
    assert text_of(deltas) == "Hello"
    assert [entry.hidden for delta in deltas for entry in delta.logprobs] == [False, True]


def test_whitespace_is_kept_exactly(tokenizer: Tokenizer) -> None:
    text = "a    b\n\n\n  c\t\td "
    assert text_of(one_by_one(TextStream(tokenizer), tokenizer.encode(text))) == text
    backend = metaspace_backend()
    ids = [token_id_of(backend, token) for token in ("▁world", "▁▁", "▁a")]
    deltas = one_by_one(TextStream(Tokenizer(backend)), ids)
    assert text_of(deltas) == " world   a"  # it goes on from a prompt


def test_the_last_delta_is_not_lost(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("One two three four\n\nUse")
    for count in range(1, len(ids) + 1):
        stream = TextStream(tokenizer, stop=["\n\nUser:"])
        assert text_of(one_by_one(stream, ids[:count])) == tokenizer.decode(ids[:count])


# ---------------------------------------------------------------- P1, P3, P5


def test_a_match_stops_at_its_token_and_shows_none_of_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ABCDEFGHIJK and more")
    num_needed = next(
        count
        for count in range(1, len(ids))
        if "DEFGHIJ" in tokenizer.decode(ids[:count])  # completed by this token
    )
    stream = TextStream(tokenizer, stop=["DEFGHIJ"], want_logprobs=True)
    deltas = one_by_one(stream, ids)
    assert text_of(deltas) == "ABC"
    assert stream.matched_stop == deltas[-1].matched_stop == "DEFGHIJ"
    assert stream.num_tokens == num_needed
    assert sum((delta.token_ids for delta in deltas), start=()) == tuple(ids[:num_needed])
    entries = b"".join(entry.bytes for delta in deltas for entry in delta.logprobs)
    assert b"EFGHIJ" not in entries


def test_a_stop_string_that_cannot_come_delays_no_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The weather in Zürich is fine, they say.")
    free = one_by_one(TextStream(tokenizer), ids)
    checked = one_by_one(TextStream(tokenizer, stop=["q" * 200]), ids)
    assert [delta.text for delta in checked] == [delta.text for delta in free]


def test_entries_wait_with_the_text_they_describe(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("no END")
    stream = TextStream(tokenizer, stop=[" ENDING"], want_logprobs=True)
    for delta in one_by_one(stream, ids):
        described = b"".join(entry.bytes for entry in delta.logprobs)
        assert described == delta.text.encode()


def test_a_stop_string_counts_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x stop y stop z")
    completed_at = [count for count, i in enumerate(ids, 1) if tokenizer.token_text(i) == " stop"]
    first, second = completed_at
    for min_tokens in range(len(ids) + 1):
        stream = TextStream(tokenizer, stop=["stop"], min_tokens=min_tokens)
        text = text_of(one_by_one(stream, ids))
        if min_tokens <= first:
            assert (text, stream.num_tokens) == ("x ", first)
        elif min_tokens <= second:
            assert (text, stream.num_tokens) == ("x stop y ", second)
        else:
            assert (text, stream.matched_stop) == ("x stop y stop z", None)


def test_a_stop_string_may_begin_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three")
    stream = TextStream(tokenizer, stop=["two three"], min_tokens=len(ids))
    assert text_of(one_by_one(stream, ids)) == "one "
    assert stream.matched_stop == "two three"


def test_include_stop_str_in_output(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two. three")
    stream = TextStream(tokenizer, stop=["two"], include_stop_str_in_output=True)
    assert text_of(one_by_one(stream, ids)) == "one two"


def test_a_stop_string_that_the_end_completes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🌶")
    stream = TextStream(tokenizer, stop=["\ufffd"])
    assert text_of(one_by_one(stream, ids[:-1])) == "a"
    assert stream.matched_stop == "\ufffd"


# ---------------------------------------------------------------- misuse


def test_tokens_without_their_logprobs_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(TextLayerError, match="2 tokens came with 1 logprobs"):
        TextStream(tokenizer, want_logprobs=True).push([1, 2], [PLAIN])


def test_an_id_that_is_no_token_adds_nothing(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, want_logprobs=True)
    delta = stream.push([tokenizer.vocab_size + 5], [PLAIN])
    assert delta.text == ""
    assert stream.num_tokens == 1
    assert delta.logprobs[0].bytes == b""
