"""The facade's own metrics: OpenTelemetry's `gen_ai.server.*` names in Prometheus form.

Labels are bounded: served model names, our routes, our error codes.
"""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from http_facade.routing_metrics import RoutingMetrics
from http_facade.state import RequestState
from traces.setup import Tracing

# the conventions' advice, seconds
_DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_request_model")


def _shared_registry() -> CollectorRegistry | None:
    """Reads what all workers wrote; None: this process is alone (see `worker.py`)."""
    directory = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if directory is None:
        return None
    registry = CollectorRegistry()
    MultiProcessCollector(registry, directory)  # type: ignore[no-untyped-call]
    return registry


class FacadeMetrics:
    def __init__(self, tracing: Tracing) -> None:
        self._registry = CollectorRegistry()
        self._of_all = _shared_registry()
        self.routing = RoutingMetrics(self._registry)
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival of a generation request to the end of its answer.",
            (*_GEN_AI_LABELS, "error_type"),
            buckets=_DURATION_BUCKETS,
            registry=self._registry,
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival of a streamed request to its first content written to the socket.",
            _GEN_AI_LABELS,
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._tpot = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Seconds per token after the first one, of streamed requests.",
            _GEN_AI_LABELS,
            buckets=_TPOT_BUCKETS,
            registry=self._registry,
        )
        self._active = Gauge(
            "http_server_active_requests",
            "Requests being answered.",
            ("http_route",),
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._answers = Counter(
            "http_server_answers",
            "Answers by status; 499: the client was gone.",
            ("http_route", "http_response_status_code"),
            registry=self._registry,
        )
        self.connections = Gauge(
            "firsttoken_open_connections",
            "Open connections, of those that --max-connections allows.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.body_bytes = Gauge(
            "firsttoken_request_body_bytes",
            "Bytes held of --max-total-body-bytes, by requests under way.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self._dropped_spans = Counter(
            "firsttoken_trace_spans_dropped",
            "Spans lost because an exporter was too slow or failed.",
            registry=self._registry,
        )
        self._tracing = tracing
        self._num_dropped_spans = 0  # counted so far

    def began(self, route: str) -> None:
        self._active.labels(route).inc()

    def ended(self, route: str, status: int, state: RequestState) -> None:
        self._count_dropped_spans()
        self._active.labels(route).dec()
        self._answers.labels(route, str(status)).inc()
        if not state.operation:
            return
        labels = (state.operation, state.model)
        seconds = state.elapsed_seconds()
        self._duration.labels(*labels, state.error_code).observe(seconds)
        if state.ttft_seconds is None:
            return
        self._ttft.labels(*labels).observe(state.ttft_seconds)
        # of one choice: several are written at the same time
        num_tokens = state.completion_tokens / max(len(state.finish_reasons), 1)
        if num_tokens > 1 and not state.error_code:
            self._tpot.labels(*labels).observe((seconds - state.ttft_seconds) / (num_tokens - 1))

    def exposition(self) -> bytes:
        """Of all workers, where this process is one of several; but what spans another one lost
        since its last request is not told yet."""
        self._count_dropped_spans()
        return generate_latest(self._of_all or self._registry)

    def _count_dropped_spans(self) -> None:
        num_dropped = self._tracing.num_dropped_spans
        if num_dropped > self._num_dropped_spans:
            self._dropped_spans.inc(num_dropped - self._num_dropped_spans)
            self._num_dropped_spans = num_dropped
