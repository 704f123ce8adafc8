"""Between the step loop and one stream's reader: delivery that never waits, memory that is bounded.

    core --RequestOutput, RequestOutput, ...--> [ one slot per sample ] --> reader

While the reader is busy, what comes merges into its sample's slot: tokens are appended, prefill
progress keeps its latest value, the finish comes last. A slot holds at most one sample's tokens.
An idle reader is woken by the first output, so a first token never waits for a second.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from engine_service.errors import EngineError
from engine_service.messages import Finish, RequestOutput, RequestTiming, TokenLogprobs


@dataclass(slots=True)
class SampleEvents:
    """What happened to one sample since the reader last looked, in this order."""

    index: int
    num_prefilled_tokens: int | None = None  # the latest, if a step prefilled
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    timing: RequestTiming | None = None  # with the first token, where it is asked for

    @classmethod
    def of(cls, output: RequestOutput) -> SampleEvents:
        return cls(
            output.index,
            output.num_prefilled_tokens,
            output.num_cached_tokens,
            [*output.new_prompt_logprobs],
            [*output.new_token_ids],
            [*output.new_logprobs],
            output.finish,
            output.timing,
        )

    def merge(self, output: RequestOutput) -> None:
        if output.num_prefilled_tokens is not None:
            self.num_prefilled_tokens = output.num_prefilled_tokens
            self.num_cached_tokens = output.num_cached_tokens
        self.prompt_logprobs += output.new_prompt_logprobs
        self.token_ids += output.new_token_ids
        self.logprobs += output.new_logprobs
        self.timing = self.timing or output.timing
        if output.finish is not None:
            self.finish = output.finish


class Collector:
    """One writer and one reader, both on the event loop."""

    def __init__(self) -> None:
        self._slots: dict[int, SampleEvents] = {}
        self._failure: EngineError | None = None
        self._news: asyncio.Future[None] | None = None  # what an idle reader waits for

    def put(self, output: RequestOutput) -> None:
        slot = self._slots.get(output.index)
        if slot is None:
            self._slots[output.index] = SampleEvents.of(output)
        else:
            slot.merge(output)
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Ends the stream: the reader gets what is in the slots, then the first error."""
        if self._failure is None:
            self._failure = error
        self._wake()

    async def take(self) -> list[SampleEvents]:
        """Empties the slots, waiting until one is filled. Raises what `fail` was given."""
        while not self._slots:
            if self._failure is not None:
                raise self._failure
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        events, self._slots = list(self._slots.values()), {}
        return events

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
