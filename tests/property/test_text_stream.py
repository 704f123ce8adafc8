"""A sample's text, entries and counts are the same however its tokens arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.text import LogprobEntry, TextStream, Tokenizer
from clients.types import TokenLogprobs
from tests.text_samples import embedded_tokenizer

texts = st.text(alphabet="ab \n漢é🌶️", min_size=1, max_size=24)


@pytest.fixture(scope="module")
def embedded(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


def run(
    stream: TextStream, chunks: list[list[int]]
) -> tuple[str, tuple[LogprobEntry, ...], tuple[int, ...], str | None, int]:
    logprob = TokenLogprobs(logprob=-0.5, rank=1, top=((5, -0.5), (9, -1.5)))
    deltas = [stream.push(chunk, [logprob] * len(chunk)) for chunk in chunks]
    deltas.append(stream.finish())
    return (
        "".join(delta.text for delta in deltas),
        sum((delta.logprobs for delta in deltas), start=()),
        sum((delta.token_ids for delta in deltas), start=()),
        deltas[-1].matched_stop,
        stream.num_tokens,
    )


@settings(max_examples=200)
@given(
    text=texts,
    stop=st.lists(st.text(alphabet="ab \n漢é🌶", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 4), max_size=8),
)
def test_chunking_changes_nothing_and_entries_describe_the_text(
    embedded: Tokenizer,
    text: str,
    stop: list[str],
    include: bool,
    min_tokens: int,
    sizes: list[int],
) -> None:
    ids = embedded.encode(text)

    def stream() -> TextStream:
        return TextStream(
            embedded,
            stop=stop,
            include_stop_str_in_output=include,
            min_tokens=min_tokens,
            want_logprobs=True,
        )

    chunks, rest = [], ids
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    one_by_one = run(stream(), [[token_id] for token_id in ids])
    assert one_by_one == run(stream(), [*chunks, rest]) == run(stream(), [ids])

    out, entries, consumed, matched, num_tokens = one_by_one
    assert consumed == tuple(ids[:num_tokens])
    entry_bytes = [entry.bytes for entry in entries]
    if matched is None:
        assert out == text
        assert b"".join(entry_bytes) == out.encode()
        assert num_tokens == len(ids)
    else:
        assert out == text[: len(out)]
        assert (text[: len(out)] if include else text[: len(out)] + matched).endswith(matched)
        assert num_tokens >= min_tokens
        # The entries end with the token that the last character sent belongs to.
        assert b"".join(entry_bytes).startswith(out.encode())
        assert len(b"".join(entry_bytes[:-1])) < len(out.encode()) or not out
