"""What a FakeEngine plays for one Generate call: steps, one after the other.

    Script((Accept(), Emit((5, 6)), Pause(0.1), Emit((7,)), Finish()))     step by step
    Script.of_tokens((5, 6, 7), chunk_sizes=2, delay_seconds=0.1)          the usual course
    Script.of_samples(((5, 6), (7, 8)))                                    n = 2, interleaved
    Script.failing(QueueFull("full", retry_after_seconds=2))               refused at the door
    Script((Accept(), Emit((5,)), Fail(InternalError("broken"))))          fails in mid-stream

Steps without a Pause between them go out back to back. A script that ends before every sample
had its Finish makes the fake break the protocol, as a faulty engine would.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from clients.errors import EngineClientError
from clients.types import FinishReason, Timing, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class Accept:
    """None: the length of the request's prompt (words, if it is text), and the request's limit."""

    prompt_tokens: int | None = None
    max_tokens: int | None = None
    relaxed: Sequence[str] = ()  # schema keywords that this engine drops


@dataclass(frozen=True, slots=True)
class Progress:
    """A PrefillProgress; None: all of the prompt."""

    computed_tokens: int | None = None
    cached_tokens: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True)
class Emit:
    """A Delta. Log probabilities go out only if the request asks; none given: made up."""

    token_ids: Sequence[int]
    index: int = 0
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """A Finished; usage and timing None: counted and measured by the fake."""

    reason: FinishReason = FinishReason.STOP
    index: int = 0
    stop_token_id: int | None = None
    usage: Usage | None = None
    timing: Timing | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Goes on when the test sets the event."""

    event: asyncio.Event


@dataclass(frozen=True, slots=True)
class Hang:
    """Says nothing more until the call is cancelled or aborted."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Ends the call with this error's status; `with_details=False`: a bare code, as of a proxy."""

    error: EngineClientError
    with_details: bool = True


Step = Accept | Progress | Emit | Finish | Pause | WaitFor | Hang | Fail


@dataclass(frozen=True, slots=True)
class Script:
    steps: tuple[Step, ...]

    @classmethod
    def of_tokens(
        cls,
        token_ids: Sequence[int],
        *,
        chunk_sizes: int | Sequence[int] = 1,
        delay_seconds: float = 0.0,
        reason: FinishReason = FinishReason.STOP,
        stop_token_id: int | None = None,
        cached_tokens: int = 0,
    ) -> Self:
        """Accepted, one PrefillProgress, deltas, Finished.

        `chunk_sizes` are tokens per delta, the last one repeated; `delay_seconds` lies before each
        delta; a `stop_token_id` is appended to the ids.
        """
        return cls.of_samples(
            (token_ids,),
            chunk_sizes=chunk_sizes,
            delay_seconds=delay_seconds,
            reason=reason,
            stop_token_id=stop_token_id,
            cached_tokens=cached_tokens,
        )

    @classmethod
    def of_samples(
        cls,
        samples: Sequence[Sequence[int]],
        *,
        chunk_sizes: int | Sequence[int] = 1,
        delay_seconds: float = 0.0,
        reason: FinishReason = FinishReason.STOP,
        stop_token_id: int | None = None,
        cached_tokens: int = 0,
    ) -> Self:
        """As `of_tokens`, for n samples that take turns."""
        end = () if stop_token_id is None else (stop_token_id,)
        steps: list[Step] = [Accept()]
        steps += [Progress(cached_tokens=cached_tokens, index=i) for i in range(len(samples))]
        chunks = [list(_chunks((*token_ids, *end), chunk_sizes)) for token_ids in samples]
        for turn in range(max(map(len, chunks), default=0)):
            if delay_seconds:
                steps.append(Pause(delay_seconds))
            for index, sample_chunks in enumerate(chunks):
                if turn < len(sample_chunks):
                    steps.append(Emit(sample_chunks[turn], index))
                if turn == len(sample_chunks) - 1:
                    steps.append(Finish(reason, index, stop_token_id))
        steps += [Finish(reason, i) for i, sample_chunks in enumerate(chunks) if not sample_chunks]
        return cls(tuple(steps))

    @classmethod
    def failing(cls, error: EngineClientError, *, with_details: bool = True) -> Self:
        """Refused before Accepted."""
        return cls((Fail(error, with_details),))


def _chunks(token_ids: Sequence[int], sizes: int | Sequence[int]) -> Iterator[tuple[int, ...]]:
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError("chunk sizes are at least one token")
    start = 0
    for turn in range(len(token_ids)):
        end = start + sizes[min(turn, len(sizes) - 1)]
        if start < len(token_ids):
            yield tuple(token_ids[start:end])
        start = end
