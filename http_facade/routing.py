"""Which of a model's engines takes a request.

    prefix        equal prefixes go to one engine, unless it is overloaded (below)
    least-loaded  the one with the most room
    round-robin   each in turn

Prefix routing is rendezvous hashing with bounded load. Each engine scores the request's key by a
hash of both; the order of the scores is the key's own order of the engines. So every facade has
the same order without a word between them; and when an engine comes or goes, only the keys move
that have it at their head. The first engine in this order that is below its bound takes the
request:

    bound = capacity x max(1.25 x mean use of all capacity, with this request, 1/8)

The mean keeps a popular prefix from loading one engine far beyond the others: it then also lives
at the next in its order, always the same one. The eighth keeps light traffic together, where a
batch has room and a miss would cost more than it relieves. A request without key goes to the least
loaded.

An engine's capacity is its `max_num_seqs`, its load the samples that run or wait there: those of
its last report that are not ours, and ours as they are now.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from http_facade.prefix_key import PrefixKey

PREFIX, ROUND_ROBIN, LEAST_LOADED = "prefix", "round-robin", "least-loaded"
ROUTING_POLICIES = (PREFIX, ROUND_ROBIN, LEAST_LOADED)

_OVER_MEAN = 1.25
_ALWAYS_ALLOWED = 1 / 8  # of an engine's capacity


class Affinity(enum.Enum):
    """How a request with a key fared."""

    HIT = "hit"  # the first engine of the key's order
    PASSED_OVER = "passed_over"  # a later one: the first was over its bound
    NO_KEY = "no_key"


class Routable(Protocol):
    @property
    def target(self) -> str: ...  # what it is told apart by, the same at every facade

    @property
    def load(self) -> int: ...  # samples

    @property
    def capacity(self) -> int: ...  # samples at once, at least 1


EngineT = TypeVar("EngineT", bound=Routable)


class Router:
    """Picks engines; knows nothing of the requests that it picked for before but their number."""

    def __init__(self, policy: str) -> None:
        if policy not in ROUTING_POLICIES:
            raise ValueError(f"no routing policy {policy!r}")
        self._policy = policy
        self._turn = 0

    @property
    def wants_key(self) -> bool:
        return self._policy == PREFIX

    def pick(
        self, engines: Sequence[EngineT], key: PrefixKey | None, num_samples: int
    ) -> tuple[EngineT, Affinity]:
        """`engines` are those that may take the request, at least one."""
        self._turn += 1
        if self._policy == ROUND_ROBIN:
            return engines[self._turn % len(engines)], Affinity.NO_KEY
        if self._policy == LEAST_LOADED or key is None:
            return self._least_loaded(engines), Affinity.NO_KEY
        return _affine(engines, key, num_samples)

    def _least_loaded(self, engines: Sequence[EngineT]) -> EngineT:
        """Of several that are equal each in turn."""
        start = self._turn % len(engines)
        return min((*engines[start:], *engines[:start]), key=_use)


def _affine(
    engines: Sequence[EngineT], key: PrefixKey, num_samples: int
) -> tuple[EngineT, Affinity]:
    ordered = sorted(engines, key=_score_of(key), reverse=True)
    is_below_bound = _bound(engines, num_samples)
    chosen = next(filter(is_below_bound, ordered))
    return chosen, Affinity.HIT if chosen is ordered[0] else Affinity.PASSED_OVER


def _bound(engines: Sequence[EngineT], num_samples: int) -> Callable[[EngineT], bool]:
    """At least one engine is below: not all can be a quarter above the mean."""
    load = sum(engine.load for engine in engines) + num_samples
    capacity = sum(engine.capacity for engine in engines)
    allowed_use = max(_OVER_MEAN * load / capacity, _ALWAYS_ALLOWED)
    return lambda engine: _use(engine) < allowed_use


def _use(engine: Routable) -> float:
    return engine.load / engine.capacity


def _score_of(key: PrefixKey) -> Callable[[Routable], bytes]:
    return lambda engine: hashlib.sha256(key + engine.target.encode()).digest()
