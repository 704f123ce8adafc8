"""What the answers of both endpoints share: their head, usage, and the sum of a stream's deltas."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from clients.text.text_stream import LogprobEntry
from http_facade.output_processor import ChoiceDelta, Usage

_LOWEST_LOGPROB = -9999.0  # in place of -inf, which JSON can't hold


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The same on every chunk of an answer."""

    id: str
    created: int  # unix seconds
    model: str  # as the caller named it
    fingerprint: str


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


# unset: the chunk has no such field
ChunkUsage = UsageBody | None | UnsetType


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.prompt_tokens + usage.completion_tokens,
        PromptTokensDetails(usage.cached_tokens),
    )


def chunk_usage(usage: Usage, *, include_usage: bool, continuous: bool) -> ChunkUsage:
    """What a chunk before the last one says about usage."""
    if continuous:
        return usage_body(usage)
    return None if include_usage else UNSET


def finite_logprob(logprob: float) -> float:
    return min(logprob, 0.0) if math.isfinite(logprob) else _LOWEST_LOGPROB


@dataclass(slots=True)
class WholeChoice:
    """One choice, all its deltas added up."""

    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[LogprobEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, delta: ChoiceDelta) -> None:
        self.pieces.append(delta.text)
        self.logprobs.extend(delta.logprobs)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


class AnswerFormat(Protocol):
    """How one endpoint writes deltas: as chunks of a stream, or added up as one answer."""

    def chunks(self, delta: ChoiceDelta, usage: ChunkUsage) -> Iterable[Struct]: ...

    def usage_chunk(self, usage: UsageBody) -> Struct: ...

    def whole(self, choices: list[WholeChoice], usage: UsageBody) -> Struct: ...
