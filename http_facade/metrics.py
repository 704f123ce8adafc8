"""The facade's own metrics: OpenTelemetry's `gen_ai.server.*` names in Prometheus form.

Labels are bounded: served model names, our routes, our error codes.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from http_facade.state import RequestState

# the conventions' advice, seconds
_DURATION_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)

_GEN_AI_LABELS = ("gen_ai_operation_name", "gen_ai_request_model")


class FacadeMetrics:
    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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
        )
        self._answers = Counter(
            "http_server_answers",
            "Answers by status; 499: the client was gone.",
            ("http_route", "http_response_status_code"),
            registry=self._registry,
        )

    def began(self, route: str) -> None:
        self._active.labels(route).inc()

    def ended(self, route: str, status: int, state: RequestState) -> None:
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
        if state.completion_tokens > 1 and not state.error_code:
            per_token = (seconds - state.ttft_seconds) / (state.completion_tokens - 1)
            self._tpot.labels(*labels).observe(per_token)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
