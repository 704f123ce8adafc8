"""Prefixes that end inside a block are copied; and after a flush nothing is found."""

from __future__ import annotations

from engine_service.kv_cache_manager import KVCacheManager
from tests.core_fakes import make_request
from tests.kv_requests import admit, cached_tokens, compute, leave


def test_a_prefix_that_ends_inside_a_block_is_copied_and_not_computed() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    first, second = make_request("a", range(12)), make_request("b", [*range(10), 77, 78])
    admit(kv, first)
    compute(kv, first)
    assert admit(kv, second) == 10
    assert (list(kv.block_ids(first)), list(kv.block_ids(second))) == ([0, 1, 2], [0, 1, 3])
    assert kv.block_copies() == [(2, 3)]
    kv.check_integrity([first, second])
    compute(kv, second)
    assert kv.block_copies() == []
    kv.check_integrity([first, second])
    assert kv.pool.num_used == 4


def test_a_block_in_the_making_gives_what_is_computed_of_it() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    first, second = make_request("a", range(8)), make_request("b", range(8))
    admit(kv, first)
    for num_computed_tokens in (1, 3, 6):
        first.num_computed_tokens = num_computed_tokens
        kv.cache_blocks(first, num_computed_tokens)
        assert cached_tokens(kv, second) == num_computed_tokens


def test_the_copied_block_is_held_until_its_step_is_over() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    first, second = make_request("a", range(7)), make_request("b", [*range(6), 99])
    admit(kv, first)
    compute(kv, first)
    leave(kv, first)
    assert admit(kv, second) == 6
    assert kv.block_copies() == [(1, 2)]
    assert (kv.pool.num_used, kv.pool.num_available) == (3, 1)
    assert admit(kv, make_request("c", range(50, 58))) is None
    compute(kv, second)
    assert (kv.pool.num_used, kv.pool.num_available) == (2, 2)
    kv.check_integrity([second])


def test_who_leaves_before_its_step_makes_no_copy() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first, second = make_request("a", range(7)), make_request("b", range(7))
    admit(kv, first)
    compute(kv, first)
    assert admit(kv, second) == 6
    leave(kv, second)
    assert kv.block_copies() == []
    kv.check_integrity([first])
    leave(kv, first)
    assert admit(kv, make_request("c", range(7))) == 6  # what it had is still there


def test_a_prompt_that_fills_the_pool_is_computed_where_there_is_no_room_for_a_copy() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=3)
    first, second = make_request("a", range(11)), make_request("b", range(11))
    admit(kv, first)
    compute(kv, first)
    leave(kv, first)
    assert kv.pool.num_cached == 3
    assert admit(kv, second) == 8
    assert kv.block_copies() == []
    kv.check_integrity([second])


def test_four_samples_cost_one_prompt_and_a_block_each() -> None:
    kv = KVCacheManager(block_size=16, num_blocks=64)
    samples = [make_request("r", range(600), index=index) for index in range(4)]
    found = []
    for sample in samples:
        found.append(admit(kv, sample))
        compute(kv, sample)
    assert found == [0, 599, 599, 599]
    assert kv.pool.num_used == 38 + 3
    for step in range(8):  # they go different ways, and 600 tokens leave 8 slots in the 38th block
        for sample in samples:
            sample.append_output(step * 10 + sample.index)
            assert kv.allocate_slots(sample, 1) == []
            compute(kv, sample)
    kv.check_integrity(samples)
    assert len({kv.block_ids(sample)[37] for sample in samples}) == 4
    for sample in samples:
        leave(kv, sample)
    kv.check_integrity([])
    assert kv.pool.num_used == 0


def test_the_same_prompt_over_and_over_keeps_one_tail() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    for _ in range(5):
        request = make_request("a", range(10))
        admit(kv, request)
        compute(kv, request)
        leave(kv, request)
        kv.check_integrity([])
    assert kv.pool.num_cached == 3


def test_no_beginning_is_found_across_salts() -> None:
    kv = KVCacheManager(block_size=16, num_blocks=8)
    first = make_request("a", range(9), cache_salt="a")
    admit(kv, first)
    compute(kv, first)
    found = {s: cached_tokens(kv, make_request("x", range(9), cache_salt=s)) for s in ("a", "b")}
    assert found == {"a": 8, "b": 0}


# ------------------------------------------------------------ flush


def test_after_a_flush_nothing_is_found_and_who_runs_goes_on() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    gone, runs = make_request("gone", range(20, 29)), make_request("runs", range(9))
    for request in (gone, runs):
        admit(kv, request)
        compute(kv, request)
    leave(kv, gone)
    assert kv.flush_prefix_cache() == 6
    kv.check_integrity([runs])
    assert (kv.pool.num_cached, kv.pool.num_used) == (0, 3)
    probes = (make_request("x", range(20, 29)), make_request("y", range(9)))
    assert [cached_tokens(kv, probe) for probe in probes] == [0, 0]
    for token in range(50, 56):  # what it computes from now on has a forgotten beginning
        runs.append_output(token)
        assert kv.allocate_slots(runs, 1) is not None
        compute(kv, runs)
        kv.check_integrity([runs])
    leave(kv, runs)
    assert kv.pool.num_free == 16


def test_what_comes_after_a_flush_is_cached_again() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    old, new = make_request("old", range(9)), make_request("new", range(9))
    admit(kv, old)
    compute(kv, old)
    kv.flush_prefix_cache()
    assert admit(kv, new) == 0
    compute(kv, new)
    kv.check_integrity([old, new])
    leave(kv, old)
    assert cached_tokens(kv, make_request("x", range(9))) == 8


def test_a_flush_does_not_stop_a_copy() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first, second = make_request("a", range(7)), make_request("b", range(7))
    admit(kv, first)
    compute(kv, first)
    admit(kv, second)
    kv.flush_prefix_cache()
    assert kv.block_copies() == [(1, 2)]
    kv.check_integrity([first, second])
    compute(kv, second)
    kv.check_integrity([first, second])
    assert kv.block_copies() == []


def test_a_copy_of_a_step_under_way_is_not_made_again_and_its_source_still_held() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first, second = make_request("a", range(7)), make_request("b", range(7))
    admit(kv, first)
    compute(kv, first)
    admit(kv, second)
    assert kv.block_copies() == [(1, 2)]
    kv.copies_are_made()
    assert kv.block_copies() == []
    leave(kv, first)
    assert kv.pool.num_used == 3
    kv.check_integrity([second])
    compute(kv, second)
    assert kv.pool.num_used == 2
    admit(kv, make_request("c", range(7)))  # in the block that was copied, or another
    assert len(kv.block_copies()) == 1
