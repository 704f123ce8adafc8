"""A request that the engine has not ended, as the actor holds it, and its reader's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from engine_service.collector import Collector, SampleEvents
from engine_service.messages import AddRequest, Finish


class RequestObserver(Protocol):
    """Is told what becomes of a request's samples, also after its reader left."""

    def first_token(self, index: int, computed_ns: int, received_ns: int) -> None: ...

    def sample_finished(self, index: int, finish: Finish) -> None: ...

    def sample_lost(self, index: int) -> None:
        """The core died."""


@dataclass(slots=True)
class Sample:
    is_queued: bool = True
    is_finished: bool = False
    num_output_tokens: int = 0
    last_token_ns: int = 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    request: AddRequest
    samples: list[Sample]
    observer: RequestObserver
    collector: Collector = field(default_factory=Collector)
    queue_timer: asyncio.TimerHandle | None = None
    has_reader: bool = True
    left_ns: int = 0  # its reader left before its end; 0: it did not
    is_expired: bool = False  # a deadline ended it, not its caller


class RequestStream:
    """The reader's end of one live request. `close` must be called, whatever happened."""

    def __init__(self, live: LiveRequest, leave: Callable[[LiveRequest], None]) -> None:
        self._live = live
        self._leave = leave
        self._num_unfinished = live.request.n

    @property
    def finished(self) -> bool:
        """The reader has seen the end of each sample."""
        return self._num_unfinished == 0

    async def take(self) -> list[SampleEvents]:
        """What happened since the last call, at least one event; raises the request's failure."""
        events = await self._live.collector.take()
        for event in events:
            if event.finish is not None:
                self._num_unfinished -= 1
        return events

    def close(self) -> None:
        """The reader leaves; what still runs for it is aborted."""
        self._leave(self._live)
