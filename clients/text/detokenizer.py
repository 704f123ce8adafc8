"""Tokens to text as they come, safe at every character boundary.

The tokens' bytes run through one incremental UTF-8 decoder, which holds at most the three bytes of
a character that has begun. So each token costs its own bytes, whatever came before; text once
returned is never taken back; and bytes that cannot become a character are shown as U+FFFD, while
a stream decoder that re-decodes tokens holds everything back behind them, or fails.

The text goes on from a prompt: leading spaces are kept, and the concatenation equals
`Tokenizer.decode` of the same ids up to the one leading space that decoding takes off for
sentencepiece models. A character left unfinished at the end is shown as U+FFFD, as `decode` shows
it: never before the end.
"""

from __future__ import annotations

import codecs
from collections.abc import Collection

from clients.text.tokenizer import Tokenizer

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
    ) -> None:
        """`shown_token_ids`: special tokens that are not skipped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._shown_token_ids = frozenset(shown_token_ids)
        self._utf8 = _utf8_decoder(errors="replace")

    @property
    def in_character(self) -> bool:
        """A character has begun and is not finished."""
        return bool(self._utf8.getstate()[0])

    def skips(self, token_id: int) -> bool:
        return (
            self._skip_special_tokens
            and self._tokenizer.is_special(token_id)
            and token_id not in self._shown_token_ids
        )

    def push(self, token_id: int) -> str:
        if self.skips(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What is left, once; the detokenizer is as new after it."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest
