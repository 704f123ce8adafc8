"""When blocks run out: who gives way, that nobody notices in the output, and that it ends."""

from __future__ import annotations

import pytest

from engine_service.messages import RequestOutput
from engine_service.request import Request, RequestStatus
from tests.core_fakes import Core, expected_tokens, make_request, shares


def two_that_outgrow_the_pool() -> tuple[Core, Request, Request]:
    """Five blocks of 4; each request has 6 prompt tokens and will have 14 in the end."""
    core = Core(num_blocks=5)
    first = make_request("first", range(6), max_tokens=8, arrival_ns=1)
    second = make_request("second", range(20, 26), max_tokens=8, arrival_ns=2)
    core.add(first, second)
    return core, first, second


def test_the_latest_of_the_lowest_priority_gives_way_and_comes_back() -> None:
    core, first, second = two_that_outgrow_the_pool()
    core.step()
    assert (list(core.kv.block_ids(first)), list(core.kv.block_ids(second))) == ([0, 1], [2, 3])
    core.step()
    core.step()  # both have 9 tokens now: block 4 is the last, and first takes it
    assert shares(core.schedule()) == {"first": 1}
    assert list(core.kv.block_ids(first)) == [0, 1, 4]
    # second found none and keeps what it has: nobody before it has asked for it
    assert second.status is RequestStatus.RUNNING
    assert list(core.kv.block_ids(second)) == [2, 3]


def test_a_paused_request_is_preempted_once_its_blocks_are_asked_for() -> None:
    core, first, second = two_that_outgrow_the_pool()
    while first.num_tokens < 13:
        core.step()
    assert second.num_tokens == 9
    assert shares(core.schedule()) == {"first": 1}  # its 13th token needs a fourth block
    assert second.status is RequestStatus.PREEMPTED
    assert (second.num_computed_tokens, second.num_preemptions) == (0, 1)
    assert list(core.kv.block_ids(first)) == [0, 1, 4, 3]  # the tail of second's chain
    assert core.scheduler.stats().num_preemptions == 1


def test_preemption_is_invisible_in_the_output() -> None:
    core, first, second = two_that_outgrow_the_pool()
    core.run()
    assert second.num_preemptions == 1
    assert core.tokens == {r.key: expected_tokens(r) for r in (first, second)}
    output = core.finished["second", 0]
    assert output.finish is not None
    assert output.finish.timing.num_preemptions == 1
    # recompute is in the chunks: 6 prompt tokens, then the 5 of 9 that the cache did not keep
    assert [c.num_tokens for c in output.finish.timing.prefill_chunks] == [6, 5]


def test_progress_never_goes_back_and_cached_tokens_are_those_of_the_first_time() -> None:
    """A prompt is preempted half-way, by a request that ranks before it."""
    core = Core(num_blocks=8, max_num_batched_tokens=5)
    core.add(make_request("a", range(8), max_tokens=16, priority=-1))
    for _ in range(4):
        core.step()
    victim = make_request("victim", range(40, 56), max_tokens=2)
    core.add(victim)
    outputs: list[RequestOutput] = []
    core.step()
    assert victim.status is RequestStatus.RUNNING
    while core.scheduler.has_unfinished_requests():
        outputs += [o for o in core.step() if o.request_id == "victim"]
    assert victim.num_preemptions > 0
    progress = [o.num_prefilled_tokens for o in outputs if o.num_prefilled_tokens is not None]
    assert progress == sorted(set(progress))
    assert progress[-1] == 16
    assert {o.num_cached_tokens for o in outputs} == {0}
    assert core.tokens["victim", 0] == expected_tokens(victim)
    assert core.scheduler.stats().num_prompt_tokens == 24


def test_a_waiting_request_preempts_nobody() -> None:
    core = Core(num_blocks=4)
    running = make_request("running", range(10), max_tokens=6, priority=5)
    core.add(running)
    core.step()
    core.add(make_request("urgent", range(20, 26), priority=0))
    while ("running", 0) not in core.finished:
        scheduler_output = core.schedule()
        assert shares(scheduler_output) == {"running": 1}
        core.update(scheduler_output)
    assert running.num_preemptions == 0
    core.run()
    assert core.tokens["urgent", 0]


def test_nobody_is_admitted_into_the_blocks_that_running_ones_will_need_next() -> None:
    core = Core(num_blocks=5)
    core.add(make_request("a", range(8), max_tokens=6, arrival_ns=1))
    core.step()
    core.add(make_request("b", range(20, 28), max_tokens=2, arrival_ns=2))
    assert shares(core.schedule()) == {"a": 1}  # a holds 3 blocks; one of the other 2 is for it
    core = Core(num_blocks=6)
    core.add(make_request("a", range(8), max_tokens=6, arrival_ns=1))
    core.step()
    core.add(make_request("b", range(20, 28), max_tokens=2, arrival_ns=2))
    assert shares(core.schedule()) == {"a": 1, "b": 8}


def test_recomputed_output_tokens_count_as_prefill_chunks() -> None:
    core = Core(num_blocks=5, max_num_batched_tokens=4, enable_caching=False)
    core.add(make_request("a", range(4), max_tokens=14, arrival_ns=1))
    core.add(second := make_request("b", [20, 21], max_tokens=9, arrival_ns=2))
    while second.status is not RequestStatus.PREEMPTED:
        core.step()
    assert second.num_tokens == 9
    core.run()
    assert [chunk.num_tokens for chunk in second.prefill_chunks] == [2, 4, 4, 1]


def test_a_running_request_of_higher_rank_takes_blocks_from_lower_ones_only() -> None:
    core = Core(num_blocks=9)
    requests = [
        make_request("low", range(8), max_tokens=20, priority=1, arrival_ns=1),
        make_request("late", range(20, 28), max_tokens=20, arrival_ns=3),
        make_request("early", range(40, 48), max_tokens=20, arrival_ns=2),
    ]
    core.add(*requests)
    core.run()
    low, late, early = requests
    assert early.num_preemptions == 0
    assert late.num_preemptions <= low.num_preemptions > 0
    assert core.tokens == {r.key: expected_tokens(r) for r in requests}


def test_a_lone_request_fills_the_pool_and_ends_by_length() -> None:
    core = Core(num_blocks=4)
    request = make_request("r", range(10), max_tokens=1000)
    core.add(request)
    core.run()
    assert request.num_tokens == 16
    assert request.num_preemptions == 0
    assert core.tokens["r", 0] == expected_tokens(request)[:6]


def test_a_prompt_that_fills_the_pool_but_for_one_token_runs() -> None:
    core = Core(num_blocks=4)
    core.add(make_request("r", range(15), max_tokens=1000))
    core.run()
    assert len(core.tokens["r", 0]) == 1


@pytest.mark.parametrize("enable_caching", [True, False])
def test_no_storm(enable_caching: bool) -> None:
    """Eight requests whose ends need twice the pool: all finish, at little recompute."""
    core = Core(num_blocks=64, block_size=16, enable_caching=enable_caching)
    requests = [
        make_request(f"r{i}", range(100 * i, 100 * i + 64), max_tokens=200, arrival_ns=i)
        for i in range(8)
    ]
    core.add(*requests)
    num_steps = core.run()
    preemptions = [request.num_preemptions for request in requests]
    assert sum(preemptions) > 0
    assert max(preemptions) <= 2
    assert num_steps < 3 * 200
    assert core.tokens == {r.key: expected_tokens(r) for r in requests}
