"""A thought, the content, its stop strings and the counts: the same however the tokens arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clients.text import TextStream, Tokenizer
from clients.text.reasoning import REASONING_FORMATS, PromptThought
from clients.types import TokenLogprobs
from tests.text_samples import embedded_tokenizer

pieces = st.sampled_from(
    ["<think>", "</think>", "<thi", "</", "nk>", "\n", " ", "a", "b", "</t", "漢", "🌶️", "<"]
)
texts = st.lists(pieces, max_size=14).map("".join)


@pytest.fixture(scope="module")
def embedded(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


@settings(max_examples=200)
@given(
    text=texts,
    name=st.sampled_from(sorted(REASONING_FORMATS)),
    prompt=st.sampled_from(PromptThought),
    stop=st.lists(st.text(alphabet="ab \n漢</tk>", min_size=1, max_size=4), max_size=2),
    sizes=st.lists(st.integers(0, 4), max_size=8),
)
def test_chunking_changes_nothing(
    embedded: Tokenizer,
    text: str,
    name: str,
    prompt: PromptThought,
    stop: list[str],
    sizes: list[int],
) -> None:
    ids = embedded.encode(text)
    chunks, rest = [], ids
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]

    def run(chunks: list[list[int]]) -> tuple[str, str, bytes, int, int, str | None]:
        stream = TextStream(
            embedded,
            stop=stop,
            want_logprobs=True,
            reasoning=REASONING_FORMATS[name].parser(prompt),
        )
        deltas = [stream.push(one, [TokenLogprobs(-0.5, 1, ())] * len(one)) for one in chunks]
        deltas.append(stream.finish())
        assert sum(delta.num_reasoning_tokens for delta in deltas) == stream.num_reasoning_tokens
        return (
            "".join(delta.thought for delta in deltas),
            "".join(delta.text for delta in deltas),
            b"".join(entry.bytes for delta in deltas for entry in delta.logprobs),
            stream.num_tokens,
            stream.num_reasoning_tokens,
            stream.matched_stop,
        )

    answer = run([ids])
    assert answer == run([[token_id] for token_id in ids]) == run([*chunks, rest])
    thought, content, entry_bytes, num_tokens, num_reasoning_tokens, matched = answer
    assert 0 <= num_reasoning_tokens <= num_tokens <= len(ids)
    assert not content or not thought or text.find(thought) < text.rfind(content)
    if matched is None:
        assert entry_bytes == text.encode()
        assert not any(string in content for string in stop)
        assert "".join(text.split()).endswith("".join(content.split()))
    else:
        assert text.encode().startswith(entry_bytes)
