"""What every route needs, in one place; the application carries it under `FACADE`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from opentelemetry.trace import Tracer

from clients.errors import EngineClientError
from clients.text.tool_parsers import TOOL_FORMATS, ToolFormat
from http_facade.engine import EngineConnection, ServedModel
from http_facade.flags import FacadeConfig
from http_facade.generation import GenerationRun
from http_facade.metrics import FacadeMetrics


class ActiveRuns:
    """The generations under way, so that a shutdown can wait for them and then end them."""

    def __init__(self) -> None:
        self._runs: set[GenerationRun] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def track(self, run: GenerationRun) -> Iterator[None]:
        self._runs.add(run)
        self._idle.clear()
        try:
            yield
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._idle.set()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    def fail_all(self, error: EngineClientError) -> None:
        for run in self._runs:
            run.fail(error)


@dataclass(slots=True)
class Facade:
    config: FacadeConfig
    connection: EngineConnection
    metrics: FacadeMetrics
    tracer: Tracer
    runs: ActiveRuns = field(default_factory=ActiveRuns)
    is_draining: bool = False  # on the way out: nothing new is taken

    @property
    def is_ready(self) -> bool:
        return self.connection.is_ready and not self.is_draining

    def tool_format(self, model: ServedModel) -> ToolFormat:
        """The one that was set, or the model's own."""
        return TOOL_FORMATS.get(self.config.tool_call_parser, model.tool_format)

    def served_names(self) -> tuple[str, ...]:
        """The engine's own name for the model, and the aliases."""
        name = self.connection.model().info.model
        return tuple(dict.fromkeys((name, *self.config.served_model_names)))


FACADE: web.AppKey[Facade] = web.AppKey("facade", Facade)
