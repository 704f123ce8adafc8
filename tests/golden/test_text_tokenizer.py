"""Encoding and decoding equal transformers' for the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from clients.text import Tokenizer
from tests.text_samples import HARD_TEXT, embedded_tokenizer

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "a    b\n\n\n  c\t\td ",
    HARD_TEXT,
    "x = 1234567890.5e-3\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|>",
    "\u00a0\u200d\ufeff\ufffd",
    "e\u0301 vs é",
    "don't  can't\n  ",
]


@pytest.fixture(scope="module")
def own(embedded_model_dir: Path) -> Tokenizer:
    return embedded_tokenizer(embedded_model_dir)


@pytest.fixture(scope="module")
def reference(embedded_model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_equals_transformers(own: Tokenizer, reference: Any, text: str) -> None:
    ids = own.encode(text)
    assert ids == reference(text)["input_ids"]
    for skip in (True, False):
        assert own.decode(ids, skip_special_tokens=skip) == reference.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


def test_every_token_alone_equals_transformers(own: Tokenizer, reference: Any) -> None:
    assert own.vocab_size == len(reference)
    special = {i for i, token in reference.added_tokens_decoder.items() if token.special}
    assert {i for i in range(own.vocab_size) if own.is_special(i)} == special
    for token_id in range(own.vocab_size):
        text = own.token_bytes(token_id).decode(errors="replace")
        assert text == reference.decode([token_id], clean_up_tokenization_spaces=False)
