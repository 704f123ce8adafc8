"""The engine service's Prometheus metrics, under the names that vLLM's dashboards know.

What the core counts is read from its last frame when somebody scrapes; only what is measured per
request (latencies, lengths, ends) costs anything when it happens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    make_wsgi_app,
    start_http_server,
)

from engine_service.errors import EngineError, WaitTooLong
from engine_service.messages import (
    AddRequest,
    CoreStats,
    Finish,
    FinishReason,
    RequestTiming,
    StructuredOutput,
)
from engine_service.metric_collectors import (
    TOKEN_GAP_BUCKETS,
    CoreCollector,
    DroppedSpans,
    TokenGaps,
)

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

_NANO: Final = 1e-9
_VLLM: Final = "vllm:"
_OURS: Final = "firsttoken_"  # what vLLM has no name for
_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_REQUEST_BUCKETS: Final = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_TOKEN_BUCKETS: Final = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip
_REJECTIONS: Final = (
    "queue_full", "queue_wait", "rate_limit_exceeded", "engine_unavailable", "request_id_in_use",
)  # fmt: skip
_GRAMMAR_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
_FREED_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
_STEP_TOKEN_BUCKETS: Final = (1, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)


class ServiceMetrics:
    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name}
        self.registry = CollectorRegistry()
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused at the door.",
            ["model_name", "reason"],
            registry=self.registry,
        )
        for rejection in _REJECTIONS:
            self._rejections.labels(**self._labels, reason=rejection)
        self._ended = Counter(
            "vllm:request_success",
            "Samples that ended, by the reason why.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        for reason in FinishReason:
            self._ended.labels(**self._labels, finished_reason=reason.name.lower())
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS
        )
        self._token_gap = TokenGaps(self._labels)
        self.registry.register(self._token_gap)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first.",
            TOKEN_GAP_BUCKETS,
        )
        self._end_to_end = self._histogram(
            "e2e_request_latency_seconds", "Arrival to the end.", _REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds",
            "Waiting for the first step, or in vain; waiting for a grammar left out.",
            _REQUEST_BUCKETS,
        )
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", _REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "First token to the end.", _REQUEST_BUCKETS
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt length.", _TOKEN_BUCKETS
        )
        self._generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for a sample.", _TOKEN_BUCKETS
        )
        self._iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", _STEP_TOKEN_BUCKETS
        )
        self._grammar_compile = self._histogram(
            "grammar_compile_seconds",
            "Compilation of one grammar, a bad one included; one found in the cache is not.",
            _GRAMMAR_BUCKETS,
            prefix=_OURS,
        )
        self._grammar_wait = Histogram(
            "firsttoken_grammar_wait_seconds",
            "The core's taking a sample to its grammar's being ready; in vain: to its end before.",
            ["model_name", "kind", "outcome"],
            buckets=_GRAMMAR_BUCKETS,
            registry=self.registry,
        )
        self._freed = self._histogram(
            "disconnect_to_freed_seconds",
            "Caller gone, or its deadline passed, to the last block of its request freed.",
            _FREED_BUCKETS,
            prefix=_OURS,
        )

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...], prefix: str = _VLLM
    ) -> Histogram:
        family = Histogram(
            prefix + name, help, ["model_name"], buckets=buckets, registry=self.registry
        )
        return family.labels(**self._labels)

    def watch_core(self, stats: Callable[[], CoreStats]) -> None:
        self.registry.register(CoreCollector(self._labels, stats))

    def watch_tracing(self, num_dropped_spans: Callable[[], int]) -> None:
        self.registry.register(DroppedSpans(self._labels, num_dropped_spans))

    # ------------------------------------------------------------ events

    def rejected(self, error: EngineError) -> None:
        reason = "queue_wait" if isinstance(error, WaitTooLong) else error.reason.lower()
        self._rejections.labels(**self._labels, reason=reason).inc()

    def step(self, num_scheduled_tokens: int) -> None:
        if num_scheduled_tokens:
            self._iteration_tokens.observe(num_scheduled_tokens)

    def grammars_compiled(self, times_ns: Sequence[int]) -> None:
        for time_ns in times_ns:
            self._grammar_compile.observe(time_ns * _NANO)

    def freed(self, since_left_ns: int) -> None:
        self._freed.observe(since_left_ns * _NANO)

    def first_token(self, since_arrival_ns: int) -> None:
        self._first_token.observe(since_arrival_ns * _NANO)

    def next_token(self, gap_ns: int) -> None:
        self._token_gap.observe(gap_ns * _NANO)

    def sample_ended(self, finish: Finish, request: AddRequest, num_output_tokens: int) -> None:
        """Stages that the sample never reached are not observed. Who waited in vain did wait:
        left out, the queue would look the shorter the more of them give up."""
        timing = finish.timing
        self.sample_lost(finish.reason)
        self._prompt_tokens.observe(len(request.prompt_token_ids))
        self._generation_tokens.observe(num_output_tokens)
        self._end_to_end.observe((timing.finished_ns - timing.arrival_ns) * _NANO)
        grammar_ns = self._grammar_waited(timing, request.structured_output)
        queue_end_ns = timing.first_scheduled_ns or timing.finished_ns
        self._queue.observe((queue_end_ns - timing.arrival_ns - grammar_ns) * _NANO)
        if timing.first_token_ns:
            decode_ns = timing.finished_ns - timing.first_token_ns
            self._prefill.observe((timing.first_token_ns - timing.first_scheduled_ns) * _NANO)
            self._decode.observe(decode_ns * _NANO)
            if num_output_tokens > 1:
                self._per_token.observe(decode_ns * _NANO / (num_output_tokens - 1))

    def _grammar_waited(self, timing: RequestTiming, grammar: StructuredOutput | None) -> int:
        """Nanoseconds; 0 without a grammar."""
        if grammar is None or not timing.taken_ns:
            return 0
        if not timing.grammar_ready_ns:
            outcome, wait_ns = "in_vain", timing.finished_ns - timing.taken_ns
        else:
            outcome = "cached" if timing.grammar_was_cached else "compiled"
            wait_ns = timing.grammar_wait_ns
        wait = self._grammar_wait.labels(**self._labels, kind=grammar.kind, outcome=outcome)
        wait.observe(wait_ns * _NANO)
        return wait_ns

    def sample_lost(self, reason: FinishReason) -> None:
        """Ended, with nothing known of its times (the core died)."""
        self._ended.labels(**self._labels, finished_reason=reason.name.lower()).inc()


def _as_text(app: WSGIApplication) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return app({**environ, "HTTP_ACCEPT": "text/plain"}, start_response)

    return answer


class MetricsServer:
    """prometheus_client's own server, in its own thread.

    It always answers in the text format 0.0.4: in OpenMetrics, which Prometheus asks for first, the
    library writes `vllm_` for `vllm:`, unless it is told that UTF-8 is taken."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises OSError when the port is taken."""
        self._server: WSGIServer
        self._thread: threading.Thread
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self._server.set_app(_as_text(make_wsgi_app(registry)))
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Blocks for up to half a second; call it off the event loop."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
