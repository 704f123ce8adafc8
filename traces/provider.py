"""The tracer provider of a process: which spans are recorded, and where each goes when it ends.

sampled   ──> a bounded queue for each exporter, emptied by a thread of its own
held      ──> a ring of the last minute (`held_spans`) ──keep(trace)──> the same queues
dropped       nothing is recorded
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

from traces.export_queue import ExportQueue
from traces.held_spans import HeldSpans
from traces.sampling import FirstTokenSampler
from traces.span_ids import new_span_id

_MAX_EVENTS = 4_096  # of a span: chunks of a long prompt, waits
_MAX_LINKS = 4_096  # of a span: steps


class _ChosenSpanIds(RandomIdGenerator):
    def generate_span_id(self) -> int:
        return new_span_id()


class FirstTokenProvider(TracerProvider):
    """`sample_ratio` and `holds` are for traces that begin here (see `sampling`)."""

    def __init__(
        self,
        service_name: str,
        exporters: Sequence[SpanExporter],
        *,
        sample_ratio: float,
        holds: bool,
        trusts_callers: bool,
    ) -> None:
        super().__init__(
            resource=Resource.create({"service.name": service_name, "process.pid": os.getpid()}),
            sampler=FirstTokenSampler(sample_ratio, holds=holds, trusts_callers=trusts_callers),
            id_generator=_ChosenSpanIds(),
            span_limits=SpanLimits(max_events=_MAX_EVENTS, max_links=_MAX_LINKS),
            shutdown_on_exit=False,
        )
        self._queues = [ExportQueue(exporter) for exporter in exporters]
        self.held = HeldSpans(self._export)
        self.add_span_processor(self.held)
        for queue in self._queues:
            self.add_span_processor(queue)

    @property
    def num_dropped_spans(self) -> int:
        """That exporters were too slow for, or failed with."""
        return sum(queue.num_dropped for queue in self._queues)

    def _export(self, span: ReadableSpan) -> None:
        for queue in self._queues:
            queue.on_end(span)
