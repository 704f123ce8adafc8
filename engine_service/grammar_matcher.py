"""One sample's way through its grammar: what it has said, and what may come next.

    accept(token) -> words_W, the mask of the next token -> accept(next token) ...

The mask is made as soon as a token is accepted: it says whether there is a choice at all, and it is
the mask of the next step if there is one.

Some grammars are so ambiguous that each token takes longer to follow than the one before, such as
`("a"*)*`: no limit on compiling finds them. So the time of each token is taken, and the first that
takes too long is the last: the request fails, before its neighbours wait for it noticeably.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from engine_service.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    import xgrammar

MAX_TOKEN_SECONDS: Final = 0.05  # of the processor; common grammars take a thousandth of it
_WORD_BITS: Final = 32


class RequestMatcher:
    def __init__(
        self, grammar: xgrammar.CompiledGrammar, vocab_size: int, *, ends_without_token: bool
    ) -> None:
        from xgrammar import GrammarMatcher

        self._matcher = GrammarMatcher(grammar, terminate_without_stop_token=ends_without_token)
        self._words_1W = torch.empty((1, -(-vocab_size // _WORD_BITS)), dtype=torch.int32)
        self._array_W = self._words_1W.numpy()[0].view(np.uint32)  # the same memory
        self._is_too_slow = False
        self._follow(None)

    @property
    def words_W(self) -> Tensor:
        """int32 [ceil(vocab_size / 32)]; bit set: allowed. Valid until the next `accept`."""
        return self._words_1W[0]

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete and its end was accepted."""
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> None:
        """Raises an EngineError, which concerns this request only."""
        if not self._follow(token_id):
            raise InternalError("The grammar does not allow the token that was sampled.")
        if self._is_too_slow:
            raise InvalidRequest(
                "is too ambiguous: it takes too long to tell which token may come next",
                field="structured_output",
            )

    def take_forced_token(self) -> int | None:
        """Accepts the only token that may come next, and returns it; None: there is a choice,
        or nothing may come."""
        token_id = self._only_token()
        if token_id is not None:
            self._follow(token_id)  # if that takes too long, the next `accept` tells
        return token_id

    def _follow(self, token_id: int | None) -> bool:
        """None: to the beginning. False: the token is not allowed."""
        start_ns = time.thread_time_ns()
        if token_id is not None and not self._matcher.accept_token(token_id):
            return False
        if not self._matcher.is_terminated():
            self._matcher.fill_next_token_bitmask(self._words_1W)
        if time.thread_time_ns() - start_ns > MAX_TOKEN_SECONDS * 1e9:
            self._is_too_slow = True
        return True

    def _only_token(self) -> int | None:
        if self._matcher.is_terminated() or np.count_nonzero(self._array_W) != 1:
            return None
        position = int(self._array_W.argmax())
        word = int(self._array_W[position])
        if word.bit_count() != 1:
            return None
        return position * _WORD_BITS + word.bit_length() - 1
