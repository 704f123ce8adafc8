"""Texts drawn from a grammar by the matcher alone: random tokens of those that it allows."""

from __future__ import annotations

import random
from typing import Final

import numpy as np
import xgrammar

_CLOSING: Final = frozenset(b'"}], ')


class GrammarSampler:
    """The longer a text gets, the more it leans to tokens that close something."""

    def __init__(self, tokenizer: xgrammar.TokenizerInfo, seed: int) -> None:
        self._tokens: list[bytes] = tokenizer.decoded_vocab
        self._stop = set(tokenizer.stop_token_ids)
        self._bitmask = xgrammar.allocate_token_bitmask(1, tokenizer.vocab_size)
        self._random = random.Random(seed)
        closing = [bool(token) and token[0] in _CLOSING for token in self._tokens]
        self._closing = np.array(closing)
        self._short = np.array([0 < len(token) <= 2 for token in self._tokens])

    def sample(self, grammar: xgrammar.CompiledGrammar, max_tokens: int) -> bytes | None:
        """None: it had not come to an end. Raises AssertionError where no token is allowed."""
        matcher = xgrammar.GrammarMatcher(grammar)
        text = b""
        for position in range(max_tokens):
            matcher.fill_next_token_bitmask(self._bitmask)
            bits = np.unpackbits(self._bitmask.numpy().view(np.uint8), bitorder="little")
            allowed = np.nonzero(bits[: len(self._tokens)])[0]
            assert len(allowed), f"nothing may follow {text!r}"
            token = self._choose(allowed, position / max_tokens)
            assert matcher.accept_token(token)
            if token in self._stop:
                return text
            text += self._tokens[token]
        return None

    def _choose(self, allowed: np.ndarray, progress: float) -> int:
        draw = self._random.random()
        for preferred, likely in ((self._closing, progress), (self._short, 0.5)):
            among = allowed[preferred[allowed]]
            if draw < likely and len(among):
                return int(self._random.choice(among))
        return int(self._random.choice(allowed))
