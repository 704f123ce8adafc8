"""The logprobs of a prompt's own tokens: gathered from the engine's events, shown once whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from clients.text.text_stream import LogprobEntry, logprob_entry
from clients.text.tokenizer import Tokenizer
from clients.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class FirstToken:
    """It follows nothing and so has no logprob."""

    token: str
    bytes: bytes
    hidden: bool  # no part of the echoed text


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    first: FirstToken
    rest: tuple[LogprobEntry, ...]  # one per token after the first


class PromptLogprobsCollector:
    """Of one prompt; the engine tells of its tokens in order, each once."""

    def __init__(
        self, token_ids: Sequence[int], tokenizer: Tokenizer, hidden_token_ids: Collection[int]
    ) -> None:
        """`hidden_token_ids`: what the prompt's text does not show."""
        self._token_ids = token_ids
        self._tokenizer = tokenizer
        self._hidden_token_ids = hidden_token_ids
        self._rest: list[LogprobEntry] = []

    @property
    def is_complete(self) -> bool:
        return len(self._rest) == len(self._token_ids) - 1

    def add(self, logprobs: Sequence[TokenLogprobs]) -> None:
        for one in logprobs:
            token_id = self._token_ids[len(self._rest) + 1]
            hidden = token_id in self._hidden_token_ids
            self._rest.append(logprob_entry(self._tokenizer, token_id, one, hidden=hidden))

    def result(self) -> PromptLogprobs:
        token_id, tokenizer = self._token_ids[0], self._tokenizer
        first = FirstToken(
            tokenizer.token_text(token_id),
            tokenizer.token_bytes(token_id),
            token_id in self._hidden_token_ids,
        )
        return PromptLogprobs(first, tuple(self._rest))
