"""Which engine a request goes to, by numbers alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

import pytest

from http_facade.routing import (
    LEAST_LOADED,
    PREFIX,
    ROUND_ROBIN,
    ROUTING_POLICIES,
    Affinity,
    Router,
)


@dataclass(eq=False)
class Engine:
    target: str
    load: int = 0
    capacity: int = 64


def engines(count: int, **fields: int) -> list[Engine]:
    return [Engine(f"10.0.0.{i}:50051", **fields) for i in range(count)]


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def place(router: Router, pool: list[Engine], number: int, samples: int = 1) -> str:
    engine, _ = router.pick(pool, key(number), samples)
    return engine.target


# ---------------------------------------------------------------- prefix


def test_a_key_has_one_engine_at_every_facade_and_whatever_came_before() -> None:
    pool = engines(5)
    first, second = Router(PREFIX), Router(PREFIX)
    for number in range(100):
        second.pick(pool, key(7), 1)
        assert place(first, pool, number) == place(second, pool[::-1], number)


def test_keys_spread_evenly() -> None:
    pool = engines(4)
    counts = Counter(place(Router(PREFIX), pool, number) for number in range(2000))
    assert all(400 < counts[engine.target] < 600 for engine in pool)


def test_only_the_keys_of_an_engine_that_goes_move_and_they_come_back() -> None:
    pool = engines(4)
    gone = pool[2].target
    for number in range(500):
        before = place(Router(PREFIX), pool, number)
        rest = [engine for engine in pool if engine.target != gone]
        after = place(Router(PREFIX), rest, number)
        assert after != gone and (before in (gone, after))


def test_light_traffic_stays_together_where_a_batch_has_room() -> None:
    pool = engines(2)
    home, _ = Router(PREFIX).pick(pool, key(1), 1)
    for _ in range(8):  # an eighth of 64
        engine, affinity = Router(PREFIX).pick(pool, key(1), 1)
        assert engine is home and affinity is Affinity.HIT
        engine.load += 1
    engine, affinity = Router(PREFIX).pick(pool, key(1), 1)
    assert engine is not home and affinity is Affinity.PASSED_OVER


@pytest.mark.parametrize("count", [2, 3, 10])
def test_one_popular_key_never_loads_an_engine_far_beyond_the_mean(count: int) -> None:
    pool = engines(count)
    router = Router(PREFIX)
    for _ in range(count * 64):
        engine, _ = router.pick(pool, key(1), 1)
        engine.load += 1
    mean = sum(engine.load for engine in pool) / count
    assert max(engine.load for engine in pool) <= max(1.25 * mean + 1, 8)


def test_what_overflows_goes_to_the_keys_next_engine_each_time() -> None:
    pool = engines(5)
    home, _ = Router(PREFIX).pick(pool, key(1), 1)
    home.load = 40
    assert len({place(Router(PREFIX), pool, 1) for _ in range(20)}) == 1


def test_capacity_counts_not_the_bare_number() -> None:
    small, large = Engine("small:1", capacity=8), Engine("large:1", capacity=512)
    numbers = [n for n in range(100) if place(Router(PREFIX), [small, large], n) == "large:1"]
    large.load, small.load = 60, 1
    assert all(place(Router(PREFIX), [small, large], n) == "large:1" for n in numbers)
    small.load = 4
    others = set(range(100)) - set(numbers)
    assert all(place(Router(PREFIX), [small, large], n) == "large:1" for n in others)


@pytest.mark.parametrize("samples", [1, 128, 100_000])
def test_some_engine_always_takes_the_request(samples: int) -> None:
    for loads in ((0, 0), (64, 64), (1000, 0), (10**6, 10**6)):
        pool = engines(2)
        for engine, load in zip(pool, loads, strict=True):
            engine.load = load
        for number in range(20):
            assert place(Router(PREFIX), pool, number, samples)
    alone = engines(1, load=10**6)
    assert Router(PREFIX).pick(alone, key(1), samples) == (alone[0], Affinity.HIT)


def test_a_request_without_key_goes_to_the_least_loaded() -> None:
    pool = engines(3, load=5)
    pool[1].load = 4
    for _ in range(5):
        assert Router(PREFIX).pick(pool, None, 1) == (pool[1], Affinity.NO_KEY)


# ---------------------------------------------------------------- the others


def test_round_robin_takes_each_in_turn() -> None:
    pool, router = engines(3), Router(ROUND_ROBIN)
    pool[0].load = 1000
    taken = [place(router, pool, 1) for _ in range(9)]
    assert Counter(taken) == {engine.target: 3 for engine in pool}
    assert taken[:3] == taken[3:6]


def test_least_loaded_takes_the_most_room_and_turns_among_equals() -> None:
    pool, router = engines(3), Router(LEAST_LOADED)
    assert len({place(router, pool, 1) for _ in range(3)}) == 3
    pool[0].load, pool[1].load, pool[2].load = 3, 2, 4
    assert {place(router, pool, n) for n in range(9)} == {pool[1].target}
    pool[2].capacity = 640
    assert {place(router, pool, n) for n in range(9)} == {pool[2].target}


def test_only_prefix_routing_needs_a_key() -> None:
    assert [policy for policy in ROUTING_POLICIES if Router(policy).wants_key] == [PREFIX]
    with pytest.raises(ValueError, match="fastest"):
        Router("fastest")
