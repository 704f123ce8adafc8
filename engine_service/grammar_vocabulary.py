"""The vocabulary as grammars see it: what text each token stands for, from tokenizer.json alone.

Special tokens are left blank, which forbids them: a template's markers would be invisible inside of
text. So are the ids of a vocabulary padded beyond its tokenizer.

The markers of tool calls are special tokens in some vocabularies. They stand for a byte that no
text holds: no text can be written with them, and a structural tag may ask for them by their ids
(`{"type": "token", "token": 5}`), which xgrammar never takes for a blank one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine_service.model_error import ModelError

if TYPE_CHECKING:
    import xgrammar

# What a decoder does to a token's spelling, as the kind of vocabulary that xgrammar reads the same
# way. In BYTE_FALLBACK "▁" is a space, with or without tokens like "<0x0A>".
_KINDS = {
    "ByteLevel": "BYTE_LEVEL",
    "ByteFallback": "BYTE_FALLBACK",
    "Metaspace": "BYTE_FALLBACK",
}

_CALL_MARKERS = frozenset(("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>"))
# The byte 0xFF, which is no part of UTF-8, as each kind writes it.
_NO_TEXT = {"BYTE_LEVEL": "\u00ff".encode(), "BYTE_FALLBACK": b"<0xFF>", "RAW": b"\xff"}


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]  # Unigram has scores in place of ids


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[_Decoder] = []


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that matter here."""

    model: _Model
    decoder: _Decoder | None = None
    added_tokens: list[_AddedToken] = []


def read_tokenizer_info(
    model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]
) -> xgrammar.TokenizerInfo:
    """Raises ModelError for a tokenizer.json that is none."""
    import xgrammar  # not above: whoever wants no grammar does without (see `grammar_compiler`)

    path = model_dir / "tokenizer.json"
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError) as error:
        raise ModelError(f"{path} is not a usable tokenizer.") from error
    kind = _kind(file.decoder)
    vocabulary = [b""] * vocab_size
    for token, token_id in _tokens(file, _NO_TEXT[kind]):
        if token_id < vocab_size:
            vocabulary[token_id] = token
    return xgrammar.TokenizerInfo(
        vocabulary,
        xgrammar.VocabType[kind],
        vocab_size=vocab_size,
        stop_token_ids=list(eos_token_ids),
    )


def _tokens(file: _TokenizerFile, no_text: bytes) -> Iterator[tuple[bytes, int]]:
    vocab = file.model.vocab
    if isinstance(vocab, dict):
        yield from ((token.encode(), token_id) for token, token_id in vocab.items())
    else:
        yield from ((token.encode(), token_id) for token_id, (token, _) in enumerate(vocab))
    for added in file.added_tokens:  # last: some are in the vocabulary, too
        blank = no_text if added.content in _CALL_MARKERS else b""
        yield blank if added.special else added.content.encode(), added.id


def _kind(decoder: _Decoder | None) -> str:
    steps = [] if decoder is None else decoder.decoders or [decoder]
    kinds = [_KINDS[step.type] for step in steps if step.type in _KINDS]
    return kinds[0] if kinds else "RAW"
