"""What became of requests between the facade and its engines.

The label `engine` is an engine's host:port: bounded by the engines there are, and what is left of
one that a name no longer has goes with it.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from http_facade.routing import Affinity


class RoutingMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._ready = Gauge(
            "firsttoken_engine_ready",
            "1: the engine serves and gets requests, as the facade (each of its workers) sees it.",
            ("engine",),
            registry=registry,
            multiprocess_mode="livemin",
        )
        self._requests = Counter(
            "firsttoken_engine_requests",
            "Calls that the engine accepted, one per prompt.",
            ("engine",),
            registry=registry,
        )
        self._reroutes = Counter(
            "firsttoken_reroutes",
            "Calls that went to another engine, or again to one, before they were accepted.",
            ("reason",),
            registry=registry,
        )
        self._affinity = Counter(
            "firsttoken_prefix_affinity",
            "Calls that prefix routing placed, where there was a choice: hit: at their prefix's "
            "own engine, passed_over: elsewhere as that was overloaded, no_key: no prefix.",
            ("outcome",),
            registry=registry,
        )

    def engine_ready(self, engine: str, *, is_ready: bool) -> None:
        self._ready.labels(engine).set(is_ready)

    def forget_engine(self, engine: str) -> None:
        self._ready.labels(engine).set(0)  # what several workers say stays written
        self._ready.remove(engine)

    def accepted(self, engine: str) -> None:
        self._requests.labels(engine).inc()

    def rerouted(self, reason: str) -> None:
        self._reroutes.labels(reason).inc()

    def placed(self, affinity: Affinity) -> None:
        self._affinity.labels(affinity.value).inc()
