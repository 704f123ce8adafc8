"""Order, budget and shares: who is computed when. Figures are exact."""

from __future__ import annotations

import pytest

from engine_service.config import SchedulerConfig
from engine_service.errors import ContextLengthExceeded, InvalidRequest, RequestIdInUse
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import FinishReason, TokenLogprobs
from engine_service.request import Request
from engine_service.scheduler import Scheduler
from tests.core_fakes import Core, expected_tokens, make_request, shares


def test_nothing_to_do_is_an_empty_step_that_does_not_count() -> None:
    core = Core()
    scheduler_output = core.schedule()
    assert (scheduler_output.step_id, scheduler_output.scheduled) == (0, [])
    assert core.update(scheduler_output) == []
    assert core.scheduler.stats().num_steps == 0


def test_continuous_batching_finishes_at_steps_2_8_5_8() -> None:
    core = Core(max_num_seqs=2)
    for i, length in enumerate([2, 8, 3, 3]):
        core.add(make_request(f"r{i}", [i, 7], max_tokens=length, arrival_ns=i))
    core.run()
    assert [core.finish_step[f"r{i}", 0] for i in range(4)] == [2, 8, 5, 8]


def test_static_batching_would_finish_at_steps_2_8_11_11() -> None:
    core = Core(max_num_seqs=2)
    requests = [
        make_request(f"r{i}", [i, 7], max_tokens=length) for i, length in enumerate([2, 8, 3, 3])
    ]
    for batch in (requests[:2], requests[2:]):
        core.add(*batch)
        core.run()
    assert [core.finish_step[f"r{i}", 0] for i in range(4)] == [2, 8, 11, 11]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    core = Core(max_num_batched_tokens=16)
    request = make_request("r", range(40), max_tokens=2)
    core.add(request)
    seen: list[tuple[int | None, int, bool]] = []
    for _ in range(4):
        scheduler_output = core.schedule()
        (share,) = scheduler_output.scheduled
        seen.append((share.num_computed_tokens, share.num_scheduled_tokens, share.samples))
        (output,) = core.update(scheduler_output)
        seen.append((output.num_prefilled_tokens, len(output.new_token_ids), output.finish is None))
    assert seen == [
        (0, 16, False), (16, 0, True),
        (16, 16, False), (32, 0, True),
        (32, 8, True), (40, 1, True),
        (40, 1, True), (None, 1, False),
    ]  # fmt: skip
    assert core.tokens["r", 0] == expected_tokens(request)


def test_decodes_get_their_token_before_chunks_share_the_rest() -> None:
    core = Core(max_num_batched_tokens=8)
    core.add(make_request("a", [1, 2], max_tokens=9, arrival_ns=1))
    core.add(make_request("b", [3, 4], max_tokens=9, arrival_ns=2))
    core.step()
    core.add(make_request("first", range(20), arrival_ns=0))  # ranks before both
    core.add(make_request("last", range(30, 50), arrival_ns=3))
    for _ in range(3):
        scheduler_output = core.schedule()
        assert shares(scheduler_output) == {"a": 1, "b": 1, "first": 6}
        core.update(scheduler_output)
    assert shares(core.schedule()) == {"a": 1, "b": 1, "first": 2, "last": 4}


def test_chunks_share_the_budget_in_order_and_the_next_is_admitted_with_what_is_left() -> None:
    core = Core(max_num_batched_tokens=10)
    core.add(make_request("a", range(12), max_tokens=3), make_request("b", range(20, 40)))
    seen = []
    for _ in range(4):
        scheduler_output = core.schedule()
        seen.append(shares(scheduler_output))
        core.update(scheduler_output)
    assert seen == [{"a": 10}, {"a": 2, "b": 8}, {"a": 1, "b": 9}, {"a": 1, "b": 3}]


def test_a_late_arrival_gets_its_first_token_while_the_others_run() -> None:
    core = Core()
    core.add(*(make_request(f"r{i}", [i], max_tokens=50) for i in range(4)))
    for _ in range(5):
        core.step()
    core.add(make_request("late", [9, 9]))
    assert [len(o.new_token_ids) for o in core.step()] == [1] * 5
    assert not core.finished


def test_concurrent_streams_share_steps() -> None:
    core = Core(num_blocks=256, max_num_seqs=16, max_num_batched_tokens=64)
    core.add(*(make_request(f"r{i}", [i, 1], max_tokens=32) for i in range(16)))
    assert core.run() == 32  # for 512 tokens


def test_waiting_requests_are_admitted_by_priority_then_arrival_then_order_of_adding() -> None:
    core = Core(max_num_seqs=1)
    rows = [("d", 1, 5), ("c", 0, 9), ("b", 0, 4), ("a", -1, 8), ("b2", 0, 4)]
    for request_id, priority, arrival_ns in rows:
        core.add(make_request(request_id, priority=priority, arrival_ns=arrival_ns, max_tokens=1))
    core.run()
    order = sorted(core.finish_step, key=lambda key: core.finish_step[key])
    assert [request_id for request_id, _ in order] == ["a", "b", "b2", "c", "d"]


def test_one_that_does_not_fit_is_not_overtaken() -> None:
    core = Core(num_blocks=8, max_num_batched_tokens=64)
    core.add(make_request("running", range(16), max_tokens=5, arrival_ns=1))
    core.step()
    core.add(make_request("long", range(30, 54), max_tokens=2, arrival_ns=2))
    core.add(make_request("short", [1], max_tokens=2, arrival_ns=3))
    assert shares(core.schedule()) == {"running": 1}
    core.run()
    assert core.finish_step["long", 0] <= core.finish_step["short", 0]


def test_with_a_budget_below_max_num_seqs_each_running_request_still_moves_in_every_step() -> None:
    core = Core(max_num_seqs=8, max_num_batched_tokens=3)
    core.add(*(make_request(f"r{i}", [i, i], max_tokens=6) for i in range(5)))
    unfinished_since: dict[str, int] = {}
    while core.has_work():
        scheduler_output = core.schedule()
        assert scheduler_output.num_scheduled_tokens <= 3
        started = set(unfinished_since)
        unfinished_since.update(dict.fromkeys(shares(scheduler_output), 1))
        assert started <= set(shares(scheduler_output))
        for output in core.update(scheduler_output):
            if output.finish is not None:
                del unfinished_since[output.request_id]


def test_a_shared_prefix_of_2000_tokens_serves_98000_of_110000_prompt_tokens() -> None:
    core = Core(num_blocks=1024, block_size=16, max_num_seqs=8, max_num_batched_tokens=4096)
    prefix = list(range(2000))
    for i in range(50):
        core.add(make_request(f"r{i}", [*prefix, *(5000 + 200 * i + j for j in range(200))]))
        core.run()
    stats = core.scheduler.stats()
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (98_000, 110_000)
    assert stats.num_prompt_tokens == 12_000


def test_a_prompt_already_cached_computes_its_last_block_only() -> None:
    core = Core()
    core.add(make_request("cold", range(17), max_tokens=1))
    core.run()
    core.add(make_request("warm", range(17), max_tokens=1))
    scheduler_output = core.schedule()
    (share,) = scheduler_output.scheduled
    assert (share.num_computed_tokens, share.num_scheduled_tokens) == (16, 1)
    assert list(share.block_ids[:4]) == [0, 1, 2, 3]
    (output,) = core.update(scheduler_output)
    assert (output.num_prefilled_tokens, output.num_cached_tokens) == (17, 16)
    assert core.tokens["warm", 0] == core.tokens["cold", 0]


def test_shares_point_at_the_live_block_table() -> None:
    core = Core()
    request = make_request("r", range(9))
    core.add(request)
    (share,) = core.schedule().scheduled
    assert list(share.block_ids) == [0, 1, 2]
    assert share.block_ids is core.kv.block_ids(request)


def test_samples_of_one_request_live_and_end_on_their_own() -> None:
    core = Core()
    samples = [make_request("r", [1, 2], index=i, max_tokens=3 + i) for i in range(3)]
    core.add(*samples)
    core.step()
    assert core.scheduler.keys_of("r") == [("r", 0), ("r", 1), ("r", 2)]
    core.record(core.scheduler.abort(("r", 1), core.now_ns))
    assert core.scheduler.keys_of("r") == [("r", 0), ("r", 2)]
    core.run()
    assert core.scheduler.keys_of("r") == []
    assert core.tokens["r", 0] == expected_tokens(samples[0])
    assert core.tokens["r", 2] == expected_tokens(samples[2])
    assert core.tokens["r", 0] != core.tokens["r", 2][:3]


def test_a_finished_output_carries_its_tokens_and_reason() -> None:
    core = Core()
    probe = make_request("probe", [4, 5], max_tokens=3)
    third = expected_tokens(probe)[2]
    core.add(make_request("stop", [4, 5], max_tokens=9, stop_token_ids=(third,)))
    core.add(make_request("length", [4, 5], max_tokens=2))
    core.run()
    stop, length = core.finished["stop", 0], core.finished["length", 0]
    assert stop.new_token_ids == [third]
    assert stop.finish is not None
    assert (stop.finish.reason, stop.finish.stop_token_id) == (FinishReason.STOP, third)
    assert length.finish is not None
    assert (length.finish.reason, length.finish.stop_token_id) == (FinishReason.LENGTH, None)


def test_logprobs_travel_with_their_token() -> None:
    core = Core()
    asked, plain = make_request("asked", max_tokens=1), make_request("plain", max_tokens=1)
    asked.sampling = type(asked.sampling)(num_logprobs=0)
    core.add(asked, plain)
    core.step()
    assert core.finished["asked", 0].new_logprobs == [TokenLogprobs(-0.5, 1, [], [])]
    assert core.finished["plain", 0].new_logprobs == []


def test_timing_tells_where_the_time_went() -> None:
    core = Core(max_num_seqs=1, max_num_batched_tokens=4)
    core.add(make_request("first", [1, 2], max_tokens=2, arrival_ns=1))
    core.add(make_request("second", range(6), max_tokens=2, arrival_ns=2))
    core.run()
    finish = core.finished["second", 0].finish
    assert finish is not None
    timing = finish.timing
    # Core: schedule() at 10, 30, 50, ...; the step runs from there for 10 ns.
    assert (timing.arrival_ns, timing.first_scheduled_ns, timing.first_step_id) == (2, 50, 3)
    chunks = [(c.step_id, c.start_ns, c.end_ns, c.num_tokens) for c in timing.prefill_chunks]
    assert chunks == [(3, 50, 60, 4), (4, 70, 80, 2)]
    assert (timing.first_token_ns, timing.finished_ns) == (80, 100)
    assert (timing.grammar_ready_ns, timing.num_preemptions) == (0, 0)


def test_stats_count_what_is_there() -> None:
    core = Core(num_blocks=16, max_num_seqs=2, max_num_batched_tokens=8)
    core.add(make_request("a", range(6), max_tokens=3), make_request("b", range(20, 29)))
    core.add(make_request("c", [1]))
    core.step()
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 1, 1)
    assert (stats.total_blocks, stats.used_blocks) == (16, 5)
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (8, 1)
    core.run()
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)
    assert stats.free_blocks + stats.cached_blocks == stats.total_blocks
    assert (stats.num_prompt_tokens, stats.num_generated_tokens) == (16, 11)


@pytest.mark.parametrize(
    ("request_", "error", "field"),
    [
        (make_request("r", []), InvalidRequest, "prompt"),
        (make_request("r", range(32)), ContextLengthExceeded, "prompt"),
        (make_request("live", [1]), RequestIdInUse, "request_id"),
    ],
    ids=["empty", "too long", "id in use"],
)
def test_what_can_never_run_is_refused_and_leaves_no_trace(
    request_: Request, error: type[InvalidRequest], field: str
) -> None:
    core = Core(num_blocks=8)
    core.add(make_request("live", [2]))
    with pytest.raises(error) as refusal:
        core.scheduler.add_request(request_)
    assert refusal.value.field == field
    core.scheduler.check_integrity()
    core.run()
    assert set(core.finished) == {("live", 0)}
    assert not core.scheduler.has_unfinished_requests()


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SchedulerConfig(max_num_seqs=0), "max_num_seqs"),
        (SchedulerConfig(max_num_batched_tokens=0), "max_num_batched_tokens"),
    ],
)
def test_limits_that_let_nothing_run_are_refused(config: SchedulerConfig, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Scheduler(config, KVCacheManager(4, 4))
    assert refusal.value.field == field


def test_a_share_is_lost_with_the_blocks_it_was_planned_for() -> None:
    core = Core()
    request = make_request("r", range(9))
    core.add(request)
    planned = core.schedule().scheduled
    assert [share.is_current for share in planned] == [True]
    core.scheduler._queues.preempt(request)
    assert [share.is_current for share in planned] == [False]
    planned += core.schedule().scheduled
    assert [share.is_current for share in planned] == [False, True]
