"""A model's tokenizer: text to token ids, token ids to text, and what each single token is.

Encoding is the `tokenizers` library's. Decoding is our own (see `token_bytes`): one reading of the
tokens' bytes as UTF-8, with U+FFFD for what is no UTF-8, so that a streamed text and a text decoded
at once are equal by construction. It equals the library's decoding except in three places where
that one loses text or could not be streamed:

- a run of `<0xNN>` tokens with one invalid byte: here the invalid part becomes U+FFFD, there all;
- several leading spaces in a Metaspace tokenizer's first token: here one is taken off, there all;
- a byte-level tokenizer's added token made of letters like "é": here itself, there mojibake.

Objects are immutable after construction and safe to use from several threads; long encodings
release the interpreter lock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import tokenizers

from clients.text.chat_template import ChatTemplate
from clients.text.errors import InvalidText, TokenizerFilesError
from clients.text.token_bytes import TokenCodec, codec_from_decoder
from clients.text.tokenizer_files import TOKENIZER, read_chat_template, read_special_tokens


class Tokenizer:
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`backend` is owned from here on: its truncation and padding are switched off."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._codec = _codec_of(backend)
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self.special_tokens: Mapping[str, str] = MappingProxyType(dict(special_tokens or {}))
        self.chat_template = chat_template
        self._special_ids = _special_ids(backend, self.special_tokens)
        self._known_bytes: dict[int, bytes] = {}  # filled on demand, at most the vocabulary
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._longest_token = max(map(len, vocabulary), default=1)  # characters
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(self._added_ids, default=-1) + 1
        )

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Tokenizer:
        """`files` by their names in a model's directory; only tokenizer.json is required."""
        if TOKENIZER not in files:
            raise TokenizerFilesError(f"the model has no {TOKENIZER}")
        try:
            backend = tokenizers.Tokenizer.from_buffer(files[TOKENIZER])
        except ValueError as error:
            raise TokenizerFilesError(f"{TOKENIZER} is not a tokenizer: {error}") from error
        special_tokens = read_special_tokens(files)
        return cls(
            backend,
            special_tokens=special_tokens,
            chat_template=read_chat_template(files, special_tokens),
        )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        try:
            # Unlike `encode`, the batch form releases the interpreter lock.
            (encoding,) = self._backend.encode_batch_fast(
                [text], add_special_tokens=add_special_tokens
            )
            return encoding.ids
        except TypeError as error:  # how the library says that a str has no UTF-8 form
            raise InvalidText("the text holds a lone surrogate, which is no character") from error

    def min_tokens(self, text: str) -> int:
        """No fewer than these does `text` have; known at once, without encoding it."""
        return math.ceil(len(text) / self._longest_token)

    def max_chars(self, num_tokens: int) -> int:
        """No more than these characters do so many tokens stand for."""
        return num_tokens * self._longest_token

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids` as a text of its own: a space that encoding puts before every text
        (sentencepiece models) is taken off again. A text that goes on is the Detokenizer's."""
        text = b"".join(
            self.token_bytes(token_id)
            for token_id in ids
            if not (skip_special_tokens and token_id in self._special_ids)
        ).decode(errors="replace")
        num_spaces = 0
        while num_spaces < self._codec.leading_spaces and text.startswith(" ", num_spaces):
            num_spaces += 1
        return text[num_spaces:]

    def token_bytes(self, token_id: int) -> bytes:
        """The token's true bytes; empty for an id that is no token (padding of the embedding)."""
        known = self._known_bytes.get(token_id)
        if known is not None:
            return known
        token = self._token(token_id)
        if token is None:
            return b""
        found = self._codec.bytes_of(token, added=token_id in self._added_ids)
        self._known_bytes[token_id] = found
        return found

    def token_text(self, token_id: int) -> str:
        """How to show one token alone. A piece of a character is shown by its bytes
        (`bytes:\\xf0\\x9f`), so that different tokens never look the same."""
        token_bytes = self.token_bytes(token_id)
        try:
            return token_bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)

    def token_id(self, token: str) -> int | None:
        """Of the token that stands in the vocabulary as this text."""
        return self._backend.token_to_id(token)

    def special_id(self, token: str) -> int | None:
        """Of the token of this text, where tokenizer.json marks it as special."""
        token_id = self._backend.token_to_id(token)
        added = {} if token_id is None else self._backend.get_added_tokens_decoder()
        return token_id if token_id in added and added[token_id].special else None

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def _token(self, token_id: int) -> str | None:
        try:
            return self._backend.id_to_token(token_id)
        except OverflowError:  # negative or beyond 32 bits
            return None


def _codec_of(backend: tokenizers.Tokenizer) -> TokenCodec:
    decoder = backend.decoder
    return codec_from_decoder(None if decoder is None else json.loads(decoder.__getstate__()))


def _special_ids(
    backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """Those marked special in tokenizer.json, and those the config gives a name to."""
    marked = (
        token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special
    )
    named = (backend.token_to_id(content) for content in special_tokens.values())
    return frozenset(marked) | frozenset(token_id for token_id in named if token_id is not None)
