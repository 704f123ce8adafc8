"""Between the spans that end and one exporter: a bounded queue that never makes anyone wait."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

_EXPORT_DELAY_MILLIS = 1_000


class ExportQueue(SpanProcessor):
    """A thread of its own empties it. What the exporter is too slow for is dropped, and counted."""

    def __init__(self, exporter: SpanExporter, max_spans: int = 8_192) -> None:
        self._max_spans = max_spans
        self._exporter = _CountingExporter(exporter)
        self._batches = BatchSpanProcessor(
            self._exporter,
            max_queue_size=2 * max_spans,  # it drops uncounted: we do before
            max_export_batch_size=min(512, max_spans),
            schedule_delay_millis=_EXPORT_DELAY_MILLIS,
        )
        self._num_taken = 0
        self._num_refused = 0

    @property
    def num_dropped(self) -> int:
        """Spans that were lost so far: there was no room, or the exporter failed with them."""
        return self._num_refused + self._exporter.num_failed

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._num_taken - self._exporter.num_seen >= self._max_spans:
            self._num_refused += 1
            return
        self._num_taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._batches.force_flush(timeout_millis)


class _CountingExporter(SpanExporter):
    """Used by the export thread."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.num_seen = 0  # done with, for good or ill
        self.num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            if result is not SpanExportResult.SUCCESS:
                self.num_failed += len(spans)
            self.num_seen += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
