"""Prefixes that are computed once though many need them at the same time."""

from __future__ import annotations

import pytest

from engine_service.messages import SamplingParams
from engine_service.request import Request, RequestStatus
from tests.core_fakes import Core, expected_tokens, make_request, shares


def burst(
    num_requests: int, prefix_tokens: int, own_tokens: int, max_tokens: int = 2
) -> list[Request]:
    prefix = list(range(prefix_tokens))
    return [
        make_request(
            f"r{i}",
            [*prefix, *(100_000 + 1000 * i + j for j in range(own_tokens))],
            max_tokens=max_tokens,
            arrival_ns=i,
        )
        for i in range(num_requests)
    ]


def computed(core: Core) -> int:
    return core.scheduler.stats().num_prompt_tokens


def test_a_burst_of_8_computes_its_1500_token_prefix_once() -> None:
    core = Core(num_blocks=1024, block_size=16, max_num_batched_tokens=512)
    requests = burst(8, prefix_tokens=1500, own_tokens=20)
    core.add(*requests)
    core.run()
    assert computed(core) == 1500 + 8 * 20
    assert [r.num_cached_tokens for r in requests] == [0, *[1500] * 7]
    assert core.tokens == {r.key: expected_tokens(r) for r in requests}


def test_50_requests_that_arrive_together_compute_their_2000_token_prefix_once() -> None:
    core = Core(num_blocks=2048, block_size=16, max_num_seqs=16, max_num_batched_tokens=1024)
    requests = burst(50, prefix_tokens=2000, own_tokens=200)
    core.add(*requests)
    core.run()
    stats = core.scheduler.stats()
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (98_000, 110_000)
    assert computed(core) == 2000 + 50 * 200
    assert all(len(core.tokens[r.key]) == 2 for r in requests)


def test_samples_of_one_prompt_compute_it_once_and_hold_it_once() -> None:
    core = Core(num_blocks=64, block_size=16, max_num_batched_tokens=128)
    samples = [make_request("r", range(200), index=i, max_tokens=5, seed=i) for i in range(4)]
    core.add(*samples)
    for _ in range(3):
        core.step()
    assert [r.status for r in samples] == [RequestStatus.RUNNING] * 4
    assert core.scheduler.stats().used_blocks == 12 + 4  # the full ones, and a tail for each
    core.run()
    assert computed(core) == 200 + 3  # of the others, each computes its last token
    assert core.tokens == {r.key: expected_tokens(r) for r in samples}


def test_followers_stand_in_nobodys_way() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    leader, follower = burst(2, prefix_tokens=24, own_tokens=3)
    other = make_request("other", [9, 9, 9], arrival_ns=5)
    core.add(leader, follower, other)
    core.update(first := core.schedule())
    core.update(second := core.schedule())
    assert [shares(first), shares(second)] == [{"r0": 16}, {"r0": 11, "other": 3}]
    assert follower.status is RequestStatus.WAITING
    assert core.scheduler.stats().num_waiting == 1
    assert shares(core.schedule()) == {"r0": 1, "other": 1, "r1": 3}


def test_a_follower_waits_for_what_is_common_and_not_for_the_rest() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16, long_prefill_token_threshold=8)
    leader = make_request("leader", range(64), arrival_ns=1)
    follower = make_request("follower", [*range(12), 99, 99], arrival_ns=2)
    core.add(leader, follower)
    seen = []
    for _ in range(4):
        scheduler_output = core.schedule()
        seen.append(shares(scheduler_output))
        core.update(scheduler_output)
    # after two chunks of 8 the 12 common tokens are there; the leader has 48 to go
    assert seen == [
        {"leader": 8},
        {"leader": 8},
        {"leader": 8, "follower": 2},
        {"follower": 1, "leader": 8},
    ]


def test_when_the_leader_is_aborted_a_follower_leads_the_others() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    requests = burst(4, prefix_tokens=64, own_tokens=2)
    core.add(*requests)
    core.step()
    core.step()
    core.record(core.scheduler.abort(("r0", 0), core.now_ns))
    scheduler_output = core.schedule()
    assert shares(scheduler_output) == {"r1": 16}  # from the 32 that r0 has left in the cache
    assert requests[1].num_cached_tokens == 32
    assert core.scheduler.stats().num_waiting == 2
    core.update(scheduler_output)
    core.run()
    assert computed(core) == 64 + 3 * 2
    assert set(core.finished) == {r.key for r in requests}


def test_when_the_leaders_step_fails_a_follower_leads_the_others() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    requests = burst(3, prefix_tokens=64, own_tokens=2)
    core.add(*requests)
    core.update(core.schedule(), failing=[("r0", 0)])
    core.run()
    assert core.tokens == {r.key: expected_tokens(r) for r in requests[1:]} | {("r0", 0): []}
    assert computed(core) == 64 + 2 * 2


def test_when_the_leader_is_preempted_its_followers_go_on() -> None:
    core = Core(num_blocks=12, max_num_batched_tokens=3)
    core.add(make_request("a", range(500, 508), max_tokens=24, priority=-1))
    for _ in range(3):
        core.step()
    leader, follower = burst(2, prefix_tokens=24, own_tokens=2)
    core.add(leader, follower)
    core.step()
    assert leader.status is RequestStatus.RUNNING
    assert follower.status is RequestStatus.WAITING
    core.run()
    assert leader.num_preemptions > 0
    assert core.tokens[leader.key] == expected_tokens(leader)
    assert core.tokens[follower.key] == expected_tokens(follower)


def test_a_follower_can_end_while_it_waits() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    requests = burst(4, prefix_tokens=64, own_tokens=2)
    requests[2].deadline_ns = 25
    core.add(*requests)
    core.step()
    assert core.scheduler.abort(("r1", 0), core.now_ns) is not None
    core.add(again := make_request("r1", requests[1].prompt_token_ids, arrival_ns=9))
    core.run()
    assert computed(core) == 64 + 3 * 2
    assert core.tokens["r3", 0] == expected_tokens(requests[3])
    assert len(again.output_token_ids) == 4
    assert core.finished["r2", 0].finish is not None
    assert requests[2].status is RequestStatus.FINISHED_ERROR


def test_after_a_flush_nobody_waits_for_what_will_not_be_found() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    leader, follower = burst(2, prefix_tokens=64, own_tokens=2)
    core.add(leader, follower)
    core.step()
    core.scheduler.flush_prefix_cache()
    core.scheduler.check_integrity()
    for _ in range(5):
        core.step()  # the leader's rest, and the beginning of the follower
    assert follower.status is RequestStatus.RUNNING
    core.run()
    assert follower.num_cached_tokens == 0
    assert core.tokens == {r.key: expected_tokens(r) for r in (leader, follower)}


@pytest.mark.parametrize("why", ["salt", "no caching", "prompt logprobs", "shorter than a block"])
def test_who_could_not_use_the_prefix_does_not_wait(why: str) -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=64, enable_caching=why != "no caching")
    first, second = burst(2, prefix_tokens=2 if why == "shorter than a block" else 24, own_tokens=2)
    if why == "salt":
        second.cache_salt = "another"
    if why == "prompt logprobs":
        second.sampling = SamplingParams(num_prompt_logprobs=0)
    core.add(first, second)
    assert set(shares(core.schedule())) == {"r0", "r1"}
