"""Tokenizers for tests of the text layer: the embedded model's, and small ones of all families."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from clients.text import Tokenizer

HARD_TEXT = "🌶️ 👩‍👩‍👧 ďábel 漢字 नमस्ते"  # characters that tokenizers split over tokens

NUM_BYTE_TOKENS = 256
_WORDS = ("▁", "▁Hello", "▁world", "Hello", "a", "b", "é", "漢", "▁▁", "▁a", "é▁")


def embedded_backend(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def embedded_files(directory: Path) -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return {name: (directory / name).read_bytes() for name in names}


def embedded_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_files(embedded_files(directory))


def fallback_backend(*, strip: bool) -> tokenizers.Tokenizer:
    """Llama-2-like: ids 0..255 are the bytes, then words, then two added tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(NUM_BYTE_TOKENS)}
    vocab |= {word: NUM_BYTE_TOKENS + place for place, word in enumerate(_WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _with_added_tokens(backend)


def metaspace_backend() -> tokenizers.Tokenizer:
    vocab = {word: place for place, word in enumerate(_WORDS)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return _with_added_tokens(backend)


def byte_level_backend() -> tokenizers.Tokenizer:
    """The 256 letters only."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _with_added_tokens(backend)


def token_id_of(backend: tokenizers.Tokenizer, token: str) -> int:
    token_id = backend.token_to_id(token)
    assert token_id is not None
    return token_id


def _with_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return backend
