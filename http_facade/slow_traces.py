"""Traces that begin here and are not sampled are held for a minute; the slow ones of them are kept.

    first content written ── slower than the threshold? ──yes──> export ours, and tell the engines
                                                        └─no───> forget it

The verdict comes with the first content, since the spans before it are held no longer than a
minute; a request that ends without any is judged then.
"""

from __future__ import annotations

import asyncio
import logging

from opentelemetry.trace import Span, format_trace_id

from clients.errors import EngineClientError
from http_facade.engine import EngineConnection
from http_facade.engine_pool import EnginePool
from traces.held import is_held
from traces.setup import Tracing

logger = logging.getLogger(__name__)


class SlowTraces:
    def __init__(self, threshold_seconds: float, engines: EnginePool, tracing: Tracing) -> None:
        self._threshold_seconds = threshold_seconds
        self._engines = engines
        self._tracing = tracing
        self._telling: set[asyncio.Task[None]] = set()

    def judge(self, span: Span, seconds: float) -> None:
        """`seconds` to the first content, or to an end without any; of a trace's SERVER span."""
        context = span.get_span_context()
        if not is_held(context):
            return
        trace_id = format_trace_id(context.trace_id)
        if seconds < self._threshold_seconds:
            self._tracing.forget(trace_id)
            return
        self._tracing.keep(trace_id)
        for engine in self._engines.engines:
            task = asyncio.create_task(self._tell(engine, trace_id))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self, engine: EngineConnection, trace_id: str) -> None:
        try:
            await engine.client.keep_traces([trace_id])
        except EngineClientError as error:
            logger.warning(
                "engine %s did not keep trace %s: %s", engine.target, trace_id, error.message
            )
