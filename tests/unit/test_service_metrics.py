"""What the engine service turns away before a request is one is counted, too, and spans it lost."""

from __future__ import annotations

import urllib.request
from contextlib import closing
from typing import Any

import pytest

from access.keys import ApiKey, digest_of
from access.limits import Limits
from engine_service.caller_limits import CallerLimits
from engine_service.config import SchedulerConfig
from engine_service.engine_actor import EngineActor
from engine_service.errors import EngineUnavailable, RateLimited
from engine_service.messages import (
    AddRequest,
    Finish,
    FinishReason,
    RequestTiming,
    SamplingParams,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.service_metrics import MetricsServer, ServiceMetrics


class Bench:
    def __init__(self) -> None:
        self.metrics = ServiceMetrics("tiny")
        self.actor = EngineActor(SchedulerConfig(), self.metrics, stall_timeout_seconds=60)

    def rejections(self, reason: str) -> float | None:
        labels = {"model_name": "tiny", "reason": reason}
        return self.metrics.registry.get_sample_value("vllm:admission_rejections_total", labels)


def test_a_generation_while_there_is_no_core_is_refused_and_counted() -> None:
    bench = Bench()
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            bench.actor.check_admits()
    with pytest.raises(EngineUnavailable):
        bench.actor.check_available()  # of what is no generation
    assert bench.rejections("engine_unavailable") == 2


def test_a_key_beyond_its_limits_is_refused_and_counted() -> None:
    bench = Bench()
    limits = CallerLimits(on_refused=bench.actor.refused)
    one_at_once = Limits(max_concurrent_requests=1, tokens_per_minute=100)
    key = ApiKey("k", digest_of("k"), "t", limits=one_at_once)
    request = AddRequest("r", [1] * 50, SamplingParams(), StoppingCriteria(max_tokens=50))
    with limits.generation(key) as allowance:
        with pytest.raises(RateLimited), limits.generation(key):
            pass
        allowance.reserve(request)
        allowance.used_tokens = 100
    with limits.generation(key) as allowance, pytest.raises(RateLimited):
        allowance.reserve(request)
    assert bench.rejections("rate_limit_exceeded") == 2


def test_lost_spans_are_read_when_somebody_scrapes() -> None:
    metrics, lost = ServiceMetrics("tiny"), [0]
    metrics.watch_tracing(lambda: lost[0])
    name, labels = "firsttoken_trace_spans_dropped_total", {"model_name": "tiny"}
    assert metrics.registry.get_sample_value(name, labels) == 0
    lost[0] = 7
    assert metrics.registry.get_sample_value(name, labels) == 7


MS = 1_000_000  # nanoseconds


@pytest.mark.parametrize(
    ("stamps", "outcome", "grammar_seconds", "queue_seconds"),
    [
        ({"grammar_ready_ns": 50 * MS, "first_scheduled_ns": 80 * MS}, "compiled", 0.04, 0.035),
        (
            {"grammar_ready_ns": 11 * MS, "first_scheduled_ns": 80 * MS, "grammar_was_cached": 1},
            *("cached", 0.001, 0.074),
        ),
        ({}, "in_vain", 0.09, 0.005),  # it gave up
        ({"grammar_ready_ns": 50 * MS}, "compiled", 0.04, 0.055),  # later: in the queue
    ],
)
def test_the_wait_for_a_grammar_is_no_time_in_the_queue(
    stamps: dict[str, Any], outcome: str, grammar_seconds: float, queue_seconds: float
) -> None:
    """Arrival at 5 ms, taken by the core at 10 ms, ended at 100 ms."""
    metrics = ServiceMetrics("tiny")
    timing = RequestTiming(arrival_ns=5 * MS, taken_ns=10 * MS, finished_ns=100 * MS, **stamps)
    request = AddRequest(
        *("r", [1], SamplingParams(), StoppingCriteria(max_tokens=2)),
        structured_output=StructuredOutput("regex", "a+"),
    )
    metrics.sample_ended(Finish(FinishReason.ABORT, timing), request, 0)

    def seconds(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"{name}_sum", {"model_name": "tiny", **labels})

    wait = seconds("firsttoken_grammar_wait_seconds", kind="regex", outcome=outcome)
    assert wait == pytest.approx(grammar_seconds)
    assert seconds("vllm:request_queue_time_seconds") == pytest.approx(queue_seconds)


def test_without_a_grammar_there_is_no_wait_for_one() -> None:
    metrics = ServiceMetrics("tiny")
    timing = RequestTiming(arrival_ns=5 * MS, taken_ns=10 * MS, finished_ns=100 * MS)
    request = AddRequest("r", [1], SamplingParams(), StoppingCriteria(max_tokens=2))
    metrics.sample_ended(Finish(FinishReason.ABORT, timing), request, 0)
    names = {s.name for family in metrics.registry.collect() for s in family.samples}
    assert not any(name.startswith("firsttoken_grammar_wait") for name in names)
    queue = metrics.registry.get_sample_value(
        "vllm:request_queue_time_seconds_sum", {"model_name": "tiny"}
    )
    assert queue == pytest.approx(0.095)


# What Prometheus 2 and 3 ask with: both would rather have OpenMetrics.
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3"
)


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "*/*", None])
def test_names_are_the_same_whatever_a_scraper_asks_for(accept: str | None) -> None:
    metrics = ServiceMetrics("tiny")
    headers = {} if accept is None else {"Accept": accept}
    with closing(MetricsServer(metrics.registry, "127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.port}/metrics"
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            text = answer.read().decode()
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert '\nvllm:e2e_request_latency_seconds_count{model_name="tiny"} 0.0\n' in text
    assert "vllm_" not in text
