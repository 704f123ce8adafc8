"""Answers of /v1/chat/completions, streamed and whole."""

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


class TopLogprobBody(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobBody(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprobBody]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprobBody]
    refusal: None = None


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET


class ChatChunk(Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET


class ChatMessage(Struct, frozen=True, tag_field="role", tag="assistant"):
    content: str
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(Struct, frozen=True, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody


class ChatFormat:
    def __init__(self, head: AnswerHead, *, want_logprobs: bool) -> None:
        self._head = head
        self._want_logprobs = want_logprobs

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[ChatChunk]:
        if delta.begins:
            role = ChatDelta(role="assistant", content="")
            yield self._chunk([ChatChunkChoice(delta.index, role)], usage)
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            text = ChatDelta(content=delta.text)
            yield self._chunk([ChatChunkChoice(delta.index, text, logprobs)], usage)
        if delta.finish_reason is not None:
            end = ChatChunkChoice(
                delta.index,
                ChatDelta(),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            yield self._chunk([end], usage)

    def usage_chunk(self, usage: UsageBody) -> ChatChunk:
        return self._chunk([], usage)

    def whole(self, choices: Sequence[WholeChoice], usage: UsageBody) -> ChatCompletion:
        head = self._head
        return ChatCompletion(
            head.id,
            head.created,
            head.model,
            head.fingerprint,
            [self._whole_choice(choice) for choice in choices],
            usage,
        )

    def _chunk(self, choices: list[ChatChunkChoice], usage: ChunkUsage) -> ChatChunk:
        head = self._head
        return ChatChunk(head.id, head.created, head.model, head.fingerprint, choices, usage)

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            choice.index,
            ChatMessage(choice.text),
            self._logprobs(choice.logprobs) if self._want_logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
        )

    @staticmethod
    def _logprobs(entries: Iterable[LogprobEntry]) -> ChatLogprobs:
        return ChatLogprobs(
            [
                TokenLogprobBody(
                    entry.token,
                    finite_logprob(entry.logprob),
                    list(entry.bytes),
                    [
                        TopLogprobBody(top.token, finite_logprob(top.logprob), list(top.bytes))
                        for top in entry.top
                    ],
                )
                for entry in entries
            ]
        )
