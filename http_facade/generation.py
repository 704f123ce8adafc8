"""One request's generation: a gRPC call per prompt, run together, read as one stream of deltas.

Each call finds an engine of its own (`placement.py`).

    pump per prompt:  engine events -> PromptProcessor -> DeltaMailbox (bounded)
    reader:           next_batch() -> whatever has arrived by now

The mailbox is bounded, so a slow client slows the pumps, they stop reading their calls, and the
engine's collectors merge what waits. One prompt that fails fails all. Leaving the run cancels every
call that is not finished: there is no other cancel path.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from clients.errors import EngineClientError
from clients.types import GenerateRequest
from http_facade.delta_mailbox import DeltaMailbox
from http_facade.output_processor import ChoiceDelta, PromptProcessor
from http_facade.placement import PlacedCall, Placement

_MAILBOX_DELTAS = 64  # per run

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PromptCall:
    request: GenerateRequest
    processor: PromptProcessor
    cache_key: str | None = None  # the caller's word for which prompts have a prefix in common


class GenerationRun:
    def __init__(
        self,
        placement: Placement,
        model_name: str,
        calls: Sequence[PromptCall],
        *,
        timeout: float | None = None,
    ) -> None:
        self._placement = placement
        self._model_name = model_name
        self._calls = calls
        self._timeout = timeout
        self._mailbox = DeltaMailbox(len(calls), _MAILBOX_DELTAS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        for call in self._calls:
            self._tasks.add(asyncio.create_task(self._pump(call)))
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._mailbox.close()
        await self._cancel_tasks()

    async def next_batch(self, timeout: float | None = None) -> list[ChoiceDelta] | None:
        """The deltas that have arrived, at least one; empty after `timeout` seconds of silence;
        None at the end. Raises what a call failed with, after what came before it."""
        return await self._mailbox.take(timeout)

    def fail(self, error: EngineClientError) -> None:
        """Ends the run from outside: the reader gets `error` next, in place of what was waiting."""
        for task in self._tasks:
            task.cancel()
        self._mailbox.fail(error)

    # ------------------------------------------------------------ inside

    async def _pump(self, call: PromptCall) -> None:
        failure: Exception | None = None
        try:
            await self._read_events(call)
        except Exception as error:
            failure = error
        self._mailbox.end(failure)

    async def _read_events(self, call: PromptCall) -> None:
        processor = call.processor
        async with self._placement.accepted(
            call.request, self._model_name, cache_key=call.cache_key, timeout=self._timeout
        ) as placed:
            async for event in placed.stream:
                for delta in processor.process(event):
                    await self._mailbox.put(delta)
                if processor.is_finished:
                    return  # leaving the stream cancels what the engine still runs
                if stopped := processor.take_stopped():
                    self._abort(placed, stopped)

    def _abort(self, placed: PlacedCall, samples: list[int]) -> None:
        """Frees stopped samples while their siblings go on; delays nobody."""
        task = asyncio.create_task(self._abort_samples(placed, samples))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _abort_samples(self, placed: PlacedCall, samples: list[int]) -> None:
        request_id = placed.stream.request_id
        try:
            await placed.engine.client.abort(request_id, samples)
        except EngineClientError as error:
            # the stream itself fails then too, or its end frees the samples
            logger.warning("could not abort samples of %s: %s", request_id, error.message)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
