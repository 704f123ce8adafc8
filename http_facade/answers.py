"""What the answers of both endpoints share: their head, usage, and the sum of a stream's deltas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from clients.text.text_stream import LogprobEntry
from http_facade.output_processor import ChoiceDelta, Usage
from http_facade.prompt_logprobs import PromptLogprobs
from http_facade.tool_calls import CallBegins, CallDelta

_LOWEST_LOGPROB = -9999.0  # in place of -inf, which JSON can't hold


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The same on every chunk of an answer."""

    id: str
    created: int  # unix seconds
    model: str  # as the caller named it
    fingerprint: str


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What an answer says beyond its text."""

    want_logprobs: bool = False
    want_token_ids: bool = False
    num_echo_logprobs: int | None = None  # alternatives per echoed token; None: no logprobs of it
    num_prompt_logprobs: int | None = None  # the same, for the field prompt_logprobs
    reasoning_fields: tuple[str, ...] = ()  # of a message, for its thought; none: it is left out


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# unset: the chunk has no such field
ChunkUsage = UsageBody | None | UnsetType


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
        CompletionTokensDetails(usage.reasoning_tokens),
    )


def finite_logprob(logprob: float) -> float:
    return min(logprob, 0.0) if math.isfinite(logprob) else _LOWEST_LOGPROB


class PromptTokenLogprob(Struct, frozen=True):
    logprob: float
    rank: int  # 1 is the most likely
    decoded_token: str


# By token id, for each prompt token: the token itself and its likeliest alternatives. The first
# token follows nothing and has none.
PromptLogprobsBody = list[dict[int, PromptTokenLogprob] | None]


def prompt_logprobs_body(
    prompt: PromptLogprobs | None, options: AnswerOptions
) -> PromptLogprobsBody | UnsetType:
    if prompt is None or options.num_prompt_logprobs is None:
        return UNSET
    body: PromptLogprobsBody = [None]
    for entry in prompt.rest:
        own = PromptTokenLogprob(finite_logprob(entry.logprob), entry.rank, entry.token)
        top = {
            one.token_id: PromptTokenLogprob(finite_logprob(one.logprob), rank, one.token)
            for rank, one in enumerate(entry.top[: options.num_prompt_logprobs], start=1)
        }
        body.append({entry.token_id: own, **top})
    return body


@dataclass(slots=True)
class WholeCall:
    """One tool call, all its deltas added up."""

    id: str
    name: str
    pieces: list[str] = field(default_factory=list)

    @property
    def arguments(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class WholeChoice:
    """One choice, all its deltas added up."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    calls: list[WholeCall] = field(default_factory=list)
    thought_pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def thought(self) -> str:
        return "".join(self.thought_pieces)

    def add(self, delta: ChoiceDelta) -> None:
        self.pieces.append(delta.text)
        self.thought_pieces.append(delta.thought)
        for call in delta.calls:
            self._add_call(call)
        self.logprobs.extend(delta.logprobs)
        self.token_ids.extend(delta.token_ids)
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    def _add_call(self, call: CallDelta) -> None:
        if isinstance(call, CallBegins):
            self.calls.append(WholeCall(call.id, call.name))
        self.calls[-1].pieces.append(call.arguments)


class AnswerFormat(Protocol):
    """How one endpoint writes deltas: as chunks of a stream, or added up as one answer."""

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterable[Struct]: ...

    def usage_chunk(self, usage: UsageBody) -> Struct: ...

    def whole(self, choices: list[WholeChoice], usage: UsageBody) -> Struct: ...
