"""Metrics that are not counted one by one: what the core and the tracing say when somebody scrapes,
and the distribution of what happens with every token."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as MetricCollector

from engine_service.messages import CoreStats

TOKEN_GAP_BUCKETS: Final = (
    0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip


class TokenGaps(MetricCollector):
    """A histogram for what happens with every token: without prometheus_client's locks, which
    cost ten times as much. One thread observes; another may scrape meanwhile."""

    def __init__(self, labels: dict[str, str]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._counts = [0] * (len(TOKEN_GAP_BUCKETS) + 1)  # the last one: above all bounds
        self._sum_seconds = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(TOKEN_GAP_BUCKETS, seconds)] += 1
        self._sum_seconds += seconds

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between tokens of a sample.", labels=self._names
        )
        bounds = [*map(str, TOKEN_GAP_BUCKETS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(self._values, buckets, self._sum_seconds)
        yield family


class CoreCollector(MetricCollector):
    """Gauges and counters of the core; counters start again with a new core."""

    def __init__(self, labels: dict[str, str], stats: Callable[[], CoreStats]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        usage = stats.used_blocks / stats.total_blocks if stats.total_blocks else 0.0
        gauges = (
            ("vllm:num_requests_running", "Samples running.", stats.num_running),
            ("vllm:num_requests_waiting", "Samples waiting.", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 1 is all.", usage),
        )
        counters = (
            ("vllm:prefix_cache_queries", "Tokens looked up.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Tokens found.", stats.prefix_cache_hits),
            ("vllm:prompt_tokens", "Prompt tokens computed.", stats.num_prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.num_generated_tokens),
            (
                "vllm:forced_tokens",
                "Generated without a step of their own.",
                stats.num_forced_tokens,
            ),
            ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
            ("firsttoken_engine_steps", "Steps computed.", stats.num_steps),
        )
        for name, help, value in gauges:
            gauge = GaugeMetricFamily(name, help, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        for name, help, value in counters:
            counter = CounterMetricFamily(name, help, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter


class DroppedSpans(MetricCollector):
    def __init__(self, labels: dict[str, str], num_dropped: Callable[[], int]) -> None:
        self._names = list(labels)
        self._values = list(labels.values())
        self._num_dropped = num_dropped

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(
            "firsttoken_trace_spans_dropped",
            "Spans lost because an exporter was too slow or failed.",
            labels=self._names,
        )
        family.add_metric(self._values, self._num_dropped())
        yield family
