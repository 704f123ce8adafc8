"""Which bytes a token stands for.

A token's bytes never depend on its neighbours in the two families of tokenizers that decoder-only
models use, so a text is the UTF-8 reading of its tokens' bytes put end to end:

    byte-level     every byte is one character of a 256-letter alphabet   "Ġthe"  -> b" the"
    sentencepiece  U+2581 is a space, "<0xE4>" is one byte                "▁the"  -> b" the"

The family and its details are read from the `decoder` section of tokenizer.json. A decoder of
another kind (WordPiece, CTC, ...) is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clients.text.errors import TokenizerFilesError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_PRINTABLE_RANGES = ((0x21, 0x7E), (0xA1, 0xAC), (0xAE, 0xFF))


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 onwards."""
    printable = [byte for first, last in _PRINTABLE_RANGES for byte in range(first, last + 1)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }


_BYTE_OF_LETTER: Mapping[str, int] = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenCodec:
    byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()  # applied to a token, in order
    byte_fallback: bool = False
    leading_spaces: int = 0  # put before a whole text by encoding, taken off again by decoding

    def bytes_of(self, token: str, *, added: bool) -> bytes:
        """An added token of a byte-level tokenizer is matched in the raw text and so stands for
        itself, even where all its characters happen to be letters of the byte alphabet."""
        if self.byte_level:
            if added:
                return token.encode()
            try:
                return bytes([_BYTE_OF_LETTER[letter] for letter in token])
            except KeyError:
                return token.encode()
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


def codec_from_decoder(decoder: object) -> TokenCodec:
    """`decoder` is the section of that name in tokenizer.json."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        if others := [str(kind) for kind in kinds if kind not in ("ByteLevel", "Fuse")]:
            raise _unsupported(f"ByteLevel together with {', '.join(others)}")
        return TokenCodec(byte_level=True)
    replacements: list[tuple[str, str]] = []
    byte_fallback = fused = False
    leading_spaces = 0
    for kind, step in zip(kinds, steps, strict=True):
        if kind == "Replace" and not fused:
            replacements.append(_replacement(step))
        elif kind == "Metaspace":
            replacements.append((str(step.get("replacement", "▁")), " "))
            leading_spaces = 0 if step.get("prepend_scheme") == "never" else 1
        elif kind == "ByteFallback":
            byte_fallback = True
        elif kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused:
            leading_spaces = _stripped_spaces(step)
        else:
            raise _unsupported(str(kind))
    if not replacements:
        raise _unsupported(" then ".join(str(kind) for kind in kinds) or "nothing")
    return TokenCodec(
        replacements=tuple(replacements),
        byte_fallback=byte_fallback,
        leading_spaces=leading_spaces,
    )


def _steps(decoder: object) -> Sequence[Mapping[str, object]]:
    if not isinstance(decoder, Mapping):
        raise TokenizerFilesError("tokenizer.json has no decoder, so its tokens cannot become text")
    steps = decoder.get("decoders") if decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        raise _unsupported("an unreadable Sequence")
    return steps


def _replacement(step: Mapping[str, object]) -> tuple[str, str]:
    pattern, content = step.get("pattern"), step.get("content")
    old = pattern.get("String") if isinstance(pattern, Mapping) else None
    if not isinstance(old, str) or not old or not isinstance(content, str):
        raise _unsupported("Replace with a pattern that is not a plain string")
    return old, content


def _stripped_spaces(step: Mapping[str, object]) -> int:
    start, stop = step.get("start"), step.get("stop")
    if step.get("content") != " " or not isinstance(start, int) or stop != 0:
        raise _unsupported("Strip of anything but leading spaces")
    return start


def _unsupported(what: str) -> TokenizerFilesError:
    return TokenizerFilesError(
        f"tokenizer.json: a decoder of this kind is not supported: {what}"
        " (supported: ByteLevel, and Replace or Metaspace with ByteFallback, Fuse and Strip)"
    )
