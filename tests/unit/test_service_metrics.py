"""What the engine service turns away before a request is one is counted, too, and spans it lost."""

from __future__ import annotations

import pytest

from access.keys import ApiKey, digest_of
from access.limits import Limits
from engine_service.caller_limits import CallerLimits
from engine_service.config import SchedulerConfig
from engine_service.engine_actor import EngineActor
from engine_service.errors import EngineUnavailable, RateLimited
from engine_service.messages import AddRequest, SamplingParams, StoppingCriteria
from engine_service.service_metrics import ServiceMetrics


class Bench:
    def __init__(self) -> None:
        self.metrics = ServiceMetrics("tiny")
        self.actor = EngineActor(SchedulerConfig(), self.metrics, stall_timeout_seconds=1)

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
