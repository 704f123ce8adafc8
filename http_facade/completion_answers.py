"""Answers of /v1/completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

from clients.text.text_stream import LogprobEntry
from http_facade.answers import (
    AnswerHead,
    ChunkUsage,
    UsageBody,
    WholeChoice,
    finite_logprob,
)
from http_facade.output_processor import ChoiceDelta


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]  # the chosen token is always among them
    text_offset: list[int]  # characters of the answer before the one that the token begins in


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class Completion(Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A whole answer, or a chunk of one: this endpoint has one shape for both."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET


class _Offsets:
    """Where tokens begin, in characters, from their bytes: continuation bytes begin nothing."""

    def __init__(self) -> None:
        self._num_begun = 0  # characters

    def next(self, entry: LogprobEntry) -> int:
        if entry.hidden:
            return self._num_begun
        inside = bool(entry.bytes) and _continues(entry.bytes[0])
        offset = max(self._num_begun - inside, 0)
        self._num_begun += sum(not _continues(byte) for byte in entry.bytes)
        return offset


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _logprobs(entries: Iterable[LogprobEntry], offsets: _Offsets) -> CompletionLogprobs:
    body = CompletionLogprobs([], [], [], [])
    for entry in entries:
        logprob = finite_logprob(entry.logprob)
        top = {top.token: finite_logprob(top.logprob) for top in entry.top}
        body.tokens.append(entry.token)
        body.token_logprobs.append(logprob)
        body.top_logprobs.append(top if entry.token in top else {**top, entry.token: logprob})
        body.text_offset.append(offsets.next(entry))
    return body


class CompletionFormat:
    def __init__(
        self, head: AnswerHead, *, n: int, echoed: Sequence[str], want_logprobs: bool
    ) -> None:
        """`echoed`: the text that each prompt's choices begin with."""
        self._head = head
        self._n = n
        self._echoed = echoed
        self._want_logprobs = want_logprobs
        self._offsets: dict[int, _Offsets] = {}  # by choice, of a stream

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[Completion]:
        if delta.begins and (echoed := self._echo(delta.index)):
            yield self._answer([CompletionChoice(delta.index, echoed)], usage)
        if delta.text or delta.logprobs:
            logprobs = None
            if delta.logprobs:
                offsets = self._offsets.setdefault(delta.index, _Offsets())
                logprobs = _logprobs(delta.logprobs, offsets)
            yield self._answer([CompletionChoice(delta.index, delta.text, logprobs)], usage)
        if delta.finish_reason is not None:
            end = CompletionChoice(
                delta.index,
                "",
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            yield self._answer([end], usage)

    def usage_chunk(self, usage: UsageBody) -> Completion:
        return self._answer([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageBody) -> Completion:
        return self._answer([self._whole_choice(choice) for choice in choices], usage)

    def _answer(self, choices: list[CompletionChoice], usage: ChunkUsage) -> Completion:
        head = self._head
        return Completion(head.id, head.created, head.model, head.fingerprint, choices, usage)

    def _whole_choice(self, choice: WholeChoice) -> CompletionChoice:
        return CompletionChoice(
            choice.index,
            self._echo(choice.index) + choice.text,
            _logprobs(choice.logprobs, _Offsets()) if self._want_logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
        )

    def _echo(self, choice: int) -> str:
        return self._echoed[choice // self._n]
