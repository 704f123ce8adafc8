"""Answers of /v1/completions, streamed and whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import UNSET, Struct, UnsetType

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
from http_facade.prompt_logprobs import PromptLogprobs
from http_facade.prompts import Prompt
from http_facade.schema import MAX_COMPLETION_LOGPROBS
from http_facade.timings import TimingsBody


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]  # the token itself is always among them
    text_offset: list[int]  # characters of the answer before the one that the token begins in


class CompletionChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsBody | UnsetType = UNSET


class Completion(Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A whole answer, or a chunk of one: this endpoint has one shape for both."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: ChunkUsage = UNSET
    timings: TimingsBody | UnsetType = UNSET  # of a stream: with the last chunk


class _Offsets:
    """Where tokens begin, in characters, from their bytes: continuation bytes begin nothing."""

    def __init__(self) -> None:
        self._num_begun = 0  # characters

    def next(self, token_bytes: bytes, *, hidden: bool) -> int:
        if hidden:
            return self._num_begun
        inside = bool(token_bytes) and _continues(token_bytes[0])
        offset = max(self._num_begun - inside, 0)
        self._num_begun += sum(not _continues(byte) for byte in token_bytes)
        return offset


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _add_tokens(
    body: CompletionLogprobs, entries: Iterable[LogprobEntry], num_top: int, offsets: _Offsets
) -> None:
    for entry in entries:
        logprob = finite_logprob(entry.logprob)
        top = {top.token: finite_logprob(top.logprob) for top in entry.top[:num_top]}
        body.tokens.append(entry.token)
        body.token_logprobs.append(logprob)
        body.top_logprobs.append(top if entry.token in top else {**top, entry.token: logprob})
        body.text_offset.append(offsets.next(entry.bytes, hidden=entry.hidden))


def _add_prompt(
    body: CompletionLogprobs, prompt: PromptLogprobs, num_top: int, offsets: _Offsets
) -> None:
    first = prompt.first
    body.tokens.append(first.token)
    body.token_logprobs.append(None)
    body.top_logprobs.append(None)
    body.text_offset.append(offsets.next(first.bytes, hidden=first.hidden))
    _add_tokens(body, prompt.rest, num_top, offsets)


class CompletionFormat:
    def __init__(
        self, head: AnswerHead, *, n: int, prompts: Sequence[Prompt], options: AnswerOptions
    ) -> None:
        self._head = head
        self._n = n
        self._prompts = prompts
        self._options = options
        self._offsets: defaultdict[int, _Offsets] = defaultdict(_Offsets)  # by choice, of a stream

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterator[Completion]:
        if delta.begins and (begin := self._begin(delta)) is not None:
            yield self._answer([begin], usage)
        token_ids = list(delta.token_ids) if self._options.want_token_ids else []
        if delta.text or delta.logprobs or token_ids:
            logprobs = None
            if delta.logprobs:
                logprobs = self._logprobs(delta.logprobs, None, self._offsets[delta.index])
            piece = CompletionChoice(
                delta.index, delta.text, logprobs, token_ids=token_ids or UNSET
            )
            yield self._answer([piece], usage)
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

    def _begin(self, delta: ChoiceDelta) -> CompletionChoice | None:
        """What a choice says of its prompt, in a stream; None: nothing."""
        echoed, prompt, options = (
            self._prompt(delta.index).text,
            delta.prompt_logprobs,
            self._options,
        )
        logprobs = None
        if prompt is not None and options.num_echo_logprobs is not None:
            logprobs = self._logprobs((), prompt, self._offsets[delta.index])
        if not (echoed or prompt is not None or options.want_token_ids):
            return None
        return CompletionChoice(
            delta.index,
            echoed,
            logprobs,
            prompt_token_ids=self._prompt_token_ids(delta.index),
            prompt_logprobs=prompt_logprobs_body(prompt, options),
        )

    def _whole_choice(self, choice: WholeChoice) -> CompletionChoice:
        options, logprobs = self._options, None
        if options.want_logprobs:
            logprobs = self._logprobs(choice.logprobs, choice.prompt_logprobs, _Offsets())
        return CompletionChoice(
            choice.index,
            self._prompt(choice.index).text + choice.text,
            logprobs,
            choice.finish_reason,
            choice.stop_reason,
            token_ids=choice.token_ids if options.want_token_ids else UNSET,
            prompt_token_ids=self._prompt_token_ids(choice.index),
            prompt_logprobs=prompt_logprobs_body(choice.prompt_logprobs, options),
        )

    def _logprobs(
        self, entries: Iterable[LogprobEntry], prompt: PromptLogprobs | None, offsets: _Offsets
    ) -> CompletionLogprobs:
        """Of the echoed prompt, if it is echoed with them, and then of generated tokens."""
        body = CompletionLogprobs([], [], [], [])
        if prompt is not None and self._options.num_echo_logprobs is not None:
            _add_prompt(body, prompt, self._options.num_echo_logprobs, offsets)
        _add_tokens(body, entries, MAX_COMPLETION_LOGPROBS, offsets)
        return body

    def _prompt(self, choice: int) -> Prompt:
        return self._prompts[choice // self._n]

    def _prompt_token_ids(self, choice: int) -> list[int] | UnsetType:
        if not self._options.want_token_ids:
            return UNSET
        return list(self._prompt(choice).token_ids)
