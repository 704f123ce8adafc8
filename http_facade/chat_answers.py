"""Answers of /v1/chat/completions, streamed and whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import UNSET, Struct, UnsetType, structs

from clients.text.text_stream import LogprobEntry
from http_facade.answers import (
    AnswerHead,
    AnswerOptions,
    ChunkUsage,
    PromptLogprobsBody,
    UsageBody,
    WholeChoice,
    finite_logprob,
    prompt_logprobs_body,
)
from http_facade.output_processor import ChoiceDelta
from http_facade.prompts import Prompt
from http_facade.timings import TimingsBody
from http_facade.tool_calls import CallBegins, CallDelta


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


class FunctionDeltaBody(Struct, frozen=True):
    arguments: str
    name: str | UnsetType = UNSET


class CallDeltaBody(Struct, frozen=True):
    index: int
    function: FunctionDeltaBody
    id: str | UnsetType = UNSET  # this and the next: with a call's first delta
    type: str | UnsetType = UNSET


class ChatDelta(Struct, frozen=True):
    role: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDeltaBody] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChunkChoice]
    usage: ChunkUsage = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET  # these two: with a choice's first chunk
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET  # with the last one, where it is asked for


class FunctionBody(Struct, frozen=True):
    name: str
    arguments: str


class CallBody(Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: FunctionBody


class ChatMessage(Struct, frozen=True, kw_only=True, tag_field="role", tag="assistant"):
    content: str | None
    reasoning: str | UnsetType = UNSET  # these two: where there is a thought
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallBody] | UnsetType = UNSET
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET
    timings: TimingsBody | UnsetType = UNSET


class ChatFormat:
    def __init__(self, head: AnswerHead, *, prompt: Prompt, options: AnswerOptions) -> None:
        self._head = head
        self._prompt = prompt
        self._options = options

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[ChatChunk]:
        if delta.begins:
            role = ChatDelta(role="assistant", content="")
            yield self._chunk([ChatChunkChoice(delta.index, role)], usage, begin=delta)
        token_ids = list(delta.token_ids) if self._options.want_token_ids else []
        thought = self._thought(delta.thought)
        if delta.text or thought or delta.calls or delta.logprobs or token_ids:
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            said = _said(delta, thought)
            piece = ChatChunkChoice(delta.index, said, logprobs, token_ids=token_ids or UNSET)
            yield self._chunk([piece], usage)
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
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=prompt_logprobs_body(choices[0].prompt_logprobs, self._options),
        )

    def _chunk(
        self,
        choices: list[ChatChunkChoice],
        usage: ChunkUsage,
        *,
        begin: ChoiceDelta | None = None,
    ) -> ChatChunk:
        """`begin`: the first delta of a choice, whose chunk also tells of the prompt."""
        head = self._head
        chunk = ChatChunk(head.id, head.created, head.model, head.fingerprint, choices, usage)
        if begin is None:
            return chunk
        return structs.replace(
            chunk,
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=prompt_logprobs_body(begin.prompt_logprobs, self._options),
        )

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return list(self._prompt.token_ids) if self._options.want_token_ids else UNSET

    def _whole_choice(self, choice: WholeChoice) -> ChatChoice:
        return ChatChoice(
            choice.index,
            _message(choice, self._thought(choice.thought)),
            self._logprobs(choice.logprobs) if self._options.want_logprobs else None,
            choice.finish_reason,
            choice.stop_reason,
            token_ids=choice.token_ids if self._options.want_token_ids else UNSET,
        )

    def _thought(self, text: str) -> dict[str, str]:
        """A message's fields for it."""
        return dict.fromkeys(self._options.reasoning_fields, text) if text else {}

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


def _said(delta: ChoiceDelta, thought: Mapping[str, str]) -> ChatDelta:
    calls = [_call_delta(call) for call in delta.calls]
    has_content = bool(delta.text) or not (calls or thought)
    return ChatDelta(
        content=delta.text if has_content else UNSET,
        tool_calls=calls if calls else UNSET,
        **thought,
    )


def _call_delta(call: CallDelta) -> CallDeltaBody:
    if isinstance(call, CallBegins):
        function = FunctionDeltaBody(call.arguments, call.name)
        return CallDeltaBody(call.index, function, call.id, "function")
    return CallDeltaBody(call.index, FunctionDeltaBody(call.arguments))


def _message(choice: WholeChoice, thought: Mapping[str, str]) -> ChatMessage:
    calls = [CallBody(call.id, FunctionBody(call.name, call.arguments)) for call in choice.calls]
    may_be_null = bool(calls or thought)
    return ChatMessage(
        content=choice.text or None if may_be_null else choice.text,
        reasoning=thought.get("reasoning", UNSET),
        reasoning_content=thought.get("reasoning_content", UNSET),
        tool_calls=calls if calls else UNSET,
    )
