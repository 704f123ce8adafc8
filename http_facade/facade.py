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
from http_facade.engine import ServedModel
from http_facade.engine_pool import EnginePool
from http_facade.flags import FacadeConfig
from http_facade.generation import GenerationRun
from http_facade.metrics import FacadeMetrics
from http_facade.placement import Placement
from http_facade.slow_traces import SlowTraces


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
    engines: EnginePool
    placement: Placement
    metrics: FacadeMetrics
    tracer: Tracer
    slow_traces: SlowTraces
    runs: ActiveRuns = field(default_factory=ActiveRuns)
    is_draining: bool = False  # on the way out: nothing new is taken

    @property
    def is_ready(self) -> bool:
        """Some engine serves: one model's engines may be gone, the others' requests go on."""
        return self.engines.is_any_ready and not self.is_draining

    def tool_format(self, model: ServedModel) -> ToolFormat:
        """The one that was set, or the model's own."""
        return TOOL_FORMATS.get(self.config.tool_call_parser, model.tool_format)

    def served_model(self, name: str | None) -> ServedModel:
        """None: the first engine's. Raises ApiError 404 for an unknown name, 503 if no engine of
        the model was there yet."""
        return self.engines.default_model() if name is None else self.engines.model(name)


FACADE: web.AppKey[Facade] = web.AppKey("facade", Facade)
