"""Our reading of tokenizer.json for grammars, beside xgrammar's own by way of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import xgrammar
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from engine_service.grammar_vocabulary import read_tokenizer_info
from engine_service.model_error import ModelError
from tests.text_samples import (
    byte_level_backend,
    embedded_backend,
    fallback_backend,
    metaspace_backend,
)

EOS = (2,)


def raw_backend() -> tokenizers.Tokenizer:
    vocabulary = {"[UNK]": 0, "the": 1, " ": 2, "▁x": 3, "<0x41>": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.decoder = decoders.Fuse()
    return backend


def save(backend: tokenizers.Tokenizer, directory: Path) -> int:
    """Returns a vocabulary size that is padded, as those of many models are."""
    backend.save(str(directory / "tokenizer.json"))
    return int(backend.get_vocab_size(with_added_tokens=True)) + 7


def theirs(directory: Path, vocab_size: int) -> xgrammar.TokenizerInfo:
    path = directory / "tokenizer.json"
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path))  # type: ignore[no-untyped-call]
    return xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=list(EOS)
    )


def special_ids(backend: tokenizers.Tokenizer) -> set[int]:
    return {i for i, token in backend.get_added_tokens_decoder().items() if token.special}


def assert_equal_but_for_special_tokens(directory: Path, vocab_size: int) -> None:
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    ours, other = read_tokenizer_info(directory, vocab_size, EOS), theirs(directory, vocab_size)
    assert ours.vocab_type == other.vocab_type
    assert (ours.vocab_size, ours.stop_token_ids) == (other.vocab_size, other.stop_token_ids)
    special = special_ids(backend)
    expected = [
        b"" if token_id in special else text for token_id, text in enumerate(other.decoded_vocab)
    ]
    assert ours.decoded_vocab == expected
    assert {i for i in special if i < vocab_size} <= {*ours.special_token_ids, *EOS}


@pytest.mark.parametrize("vocab_size", [49152, 49152 + 40, 1000])
def test_the_embedded_models_vocabulary(embedded_model_dir: Path, vocab_size: int) -> None:
    """As large as its tokenizer's, padded beyond it, and cut short."""
    assert special_ids(embedded_backend(embedded_model_dir))
    assert_equal_but_for_special_tokens(embedded_model_dir, vocab_size)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        (byte_level_backend(), xgrammar.VocabType.BYTE_LEVEL),
        (fallback_backend(strip=True), xgrammar.VocabType.BYTE_FALLBACK),
        (fallback_backend(strip=False), xgrammar.VocabType.BYTE_FALLBACK),
        (raw_backend(), xgrammar.VocabType.RAW),
    ],
    ids=["byte-level", "sentencepiece", "sentencepiece without a prefix", "raw"],
)
def test_each_kind_of_vocabulary(
    backend: tokenizers.Tokenizer, kind: xgrammar.VocabType, tmp_path: Path
) -> None:
    vocab_size = save(backend, tmp_path)
    assert read_tokenizer_info(tmp_path, vocab_size, EOS).vocab_type == kind
    assert_equal_but_for_special_tokens(tmp_path, vocab_size)


def test_a_word_mark_is_a_space_without_byte_tokens_too(tmp_path: Path) -> None:
    """Where xgrammar's own reading takes the mark for a character of the text."""
    vocab_size = save(metaspace_backend(), tmp_path)
    ours, other = read_tokenizer_info(tmp_path, vocab_size, EOS), theirs(tmp_path, vocab_size)
    marked = [i for i, text in enumerate(other.decoded_vocab) if "▁".encode() in text]
    assert marked
    for token_id, text in enumerate(other.decoded_vocab):
        if token_id in marked:
            assert ours.decoded_vocab[token_id] == text.replace("▁".encode(), b" ")


def test_unigram_vocabularies_count_their_ids(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0), ("▁a", -1.0), ("b", -2.0)]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0, byte_fallback=False))
    backend.decoder = decoders.Metaspace()
    save(backend, tmp_path)
    assert read_tokenizer_info(tmp_path, 4, EOS).decoded_vocab == [b"<unk>", b" a", b"b", b""]


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": {"vocab": 3}}'])
def test_what_is_no_tokenizer_is_a_model_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a usable tokenizer"):
        read_tokenizer_info(tmp_path, 4, EOS)
