"""Between priorities, tenants and arrivals: whose turn it is."""

from __future__ import annotations

import pytest

from engine_service.config import SchedulerConfig
from engine_service.errors import InvalidRequest
from engine_service.fair_share import FairShare
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request, RequestStatus
from engine_service.scheduler import Scheduler
from engine_service.simulate import Simulation, measure_flood
from engine_service.simulate import make_request as simulated_request
from engine_service.waiting_queue import WaitingQueue
from tests.core_fakes import Core, make_request, shares

SECOND = 1_000_000_000


# ---------------------------------------------------------------- priority and aging


def order_of_service(requests: list[Request], now_ns: int, aging_ns: int = 30 * SECOND) -> str:
    fair_share = FairShare({})
    queue = WaitingQueue(fair_share, aging_ns)
    for i, request in enumerate(requests):
        request.rank = request.place = (queue.due_ns(request), i)
        fair_share.joined(request)
        queue.add(request)
    order = []
    while (request_ := queue.head(now_ns)) is not None:
        queue.check_integrity()
        queue.remove(request_)
        order.append(request_.request_id)
    return "".join(order)


def test_priority_then_arrival_then_order_of_adding() -> None:
    rows = [("d", 1, 5), ("c", 0, 9), ("b", 0, 4), ("a", -1, 8), ("e", 1, 5)]
    requests = [make_request(name, priority=p, arrival_ns=a) for name, p, a in rows]
    assert order_of_service(requests, now_ns=10) == "abcde"


def test_who_waited_long_enough_is_overtaken_by_nobody() -> None:
    old = make_request("o", priority=1, arrival_ns=0)
    urgent = make_request("u", priority=0, arrival_ns=31 * SECOND)
    assert order_of_service([old, urgent], now_ns=31 * SECOND) == "ou"
    urgent = make_request("u", priority=0, arrival_ns=29 * SECOND)
    assert order_of_service([old, urgent], now_ns=29 * SECOND) == "uo"


def test_priority_counts_between_tenants_until_the_other_has_waited_its_time() -> None:
    for now_seconds, first in ((20, "u"), (50, "l")):
        fair_share = FairShare({})
        queue = WaitingQueue(fair_share, 30 * SECOND)
        light = make_request("l", priority=1, tenant="light", arrival_ns=0)
        urgent = make_request("u", tenant="heavy", arrival_ns=now_seconds * SECOND)
        for i, request in enumerate([light, urgent]):
            request.rank = request.place = (queue.due_ns(request), i)
            fair_share.joined(request)
            queue.add(request)
        fair_share.charge(urgent, 1000)  # the urgent one's tenant has had more
        head = queue.head(now_seconds * SECOND)
        assert head is not None
        assert head.request_id == first


def test_a_stream_of_urgent_requests_does_not_starve_the_others() -> None:
    config = SchedulerConfig(max_num_seqs=1, priority_aging_seconds=2.0)
    patient = simulated_request("patient", [1, 2], 2, priority=3, arrival_ns=1)
    urgent = [
        simulated_request(f"u{i}", [3, i], 8, arrival_ns=round(i * 0.15 * SECOND))
        for i in range(200)
    ]
    Simulation(config, num_blocks=64).run([patient, *urgent])
    waited_seconds = patient.first_scheduled_ns / SECOND
    assert 5.5 < waited_seconds < 10  # three units of priority, two seconds each


# ---------------------------------------------------------------- fair share of the tokens


def test_tenants_take_turns_whatever_each_has_queued() -> None:
    core = Core(num_blocks=256, max_num_seqs=1)
    flood = [make_request(f"f{i}", [i, 1], tenant="flood") for i in range(20)]
    light = [make_request(f"l{i}", [50 + i, 2], tenant="light", arrival_ns=i) for i in range(3)]
    core.add(*flood, *light)
    core.run()
    order = sorted(core.finish_step, key=lambda key: core.finish_step[key])
    assert [name for name, _ in order][:7] == ["f0", "l0", "f1", "l1", "f2", "l2", "f3"]


def test_tokens_are_shared_by_weight_over_a_long_contention() -> None:
    config = SchedulerConfig(max_num_seqs=8, tenant_weights={"a": 3, "b": 2})
    simulation = Simulation(config, num_blocks=4096)
    for tenant, prompt_tokens, max_tokens in (("a", 40, 10), ("b", 10, 40), ("c", 100, 5)):
        for i in range(400):
            prompt = [hash((tenant, i, j)) % 50_000 for j in range(prompt_tokens)]
            simulation.scheduler.add_request(
                simulated_request(f"{tenant}{i}", prompt, max_tokens, tenant=tenant)
            )
    had = {"a": 0, "b": 0, "c": 0}
    for _ in range(400):
        for share in simulation.step().scheduled:
            had[share.request.tenant] += share.num_scheduled_tokens
    total = sum(had.values())
    # the difference is at most what is under way for one tenant, of about 15,000 tokens
    assert [round(6 * had[t] / total, 1) for t in "abc"] == pytest.approx([3, 2, 1], abs=0.15)


def test_what_was_not_used_is_not_saved_up() -> None:
    """By a tenant that was away, nor by one that had a single stream all the time."""
    fair_share = FairShare({})
    busy = [make_request(f"b{i}", tenant="busy") for i in range(3)]
    modest = [make_request(f"m{i}", tenant="modest") for i in range(2)]
    back = make_request("c", tenant="back")
    for running in (busy[0], modest[0]):
        fair_share.joined(running)
        fair_share.started(running)
    fair_share.charge(busy[0], 5000)
    fair_share.charge(modest[0], 50)
    fair_share.joined(busy[1])
    for late in (modest[1], back):
        fair_share.joined(late)
        assert fair_share.turn(late)[0] == fair_share.turn(busy[1])[0] == 5000


def test_who_comes_when_nobody_waits_starts_level_with_the_least_of_those_that_run() -> None:
    fair_share = FairShare({})
    running = [make_request(f"r{i}", tenant=f"t{i}") for i in range(2)]
    for request, num_tokens in zip(running, (700, 900), strict=True):
        fair_share.joined(request)
        fair_share.started(request)
        fair_share.charge(request, num_tokens)
    newcomer = make_request("n", tenant="new")
    fair_share.joined(newcomer)
    assert fair_share.turn(newcomer)[0] == 700


def test_what_was_had_at_nobodys_cost_is_not_charged() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    first = make_request("a", range(40), max_tokens=40, tenant="a")
    core.add(first)
    core.add(make_request("b", [50], max_tokens=40, tenant="b"))
    for _ in range(5):
        core.step()
    charged = core.scheduler._queues.fair_share.turn(first)[0]
    for _ in range(20):  # both decode, and nobody wants more
        core.step()
    assert core.scheduler._queues.fair_share.turn(first)[0] == charged


def test_a_debt_is_kept_until_those_that_stay_have_had_as_much() -> None:
    fair_share = FairShare({})
    stays, goes = make_request("s", tenant="stays"), make_request("g", tenant="goes")
    fair_share.joined(stays)
    for num_tokens, debt in ((3000, 3000), (0, 3000), (0, 3000)):
        fair_share.joined(goes)
        fair_share.charge(goes, num_tokens)
        assert fair_share.turn(goes)[0] == debt
        fair_share.left(goes)
    fair_share.charge(stays, 5000)
    fair_share.joined(goes)
    assert fair_share.turn(goes)[0] == 5000
    fair_share.left(goes)
    assert fair_share._debts == {}


def test_only_so_many_debts_are_remembered_and_the_largest() -> None:
    fair_share = FairShare({})
    stays = make_request("s", tenant="stays")
    fair_share.joined(stays)
    for i in range(1000):
        goes = make_request("g", tenant=f"t{i}")
        fair_share.joined(goes)
        fair_share.charge(goes, 10 + i)
        fair_share.left(goes)
        fair_share.check_integrity([stays])
    assert set(fair_share._debts) == {f"t{i}" for i in range(1000 - 256, 1000)}


def test_a_tenant_without_requests_has_no_part_in_the_seats() -> None:
    fair_share = FairShare({"gone": 100})
    first, second = (make_request(f"r{i}", tenant="here") for i in range(2))
    gone, other = make_request("g", tenant="gone"), make_request("o", tenant="other")
    for request in (first, second, gone, other):
        fair_share.joined(request)
    fair_share.started(first)
    fair_share.started(second)
    fair_share.charge(gone, 1000)
    fair_share.left(gone)
    assert fair_share._debts == {"gone": 10}
    assert list(fair_share.holders_above_share()) == ["here"]
    assert fair_share.places_for(other) == {"here": 1}


@pytest.mark.parametrize("num_streams", [1, 2])
def test_a_flood_gets_no_credit_over_who_was_here_before(num_streams: int) -> None:
    simulation = Simulation(SchedulerConfig(), num_blocks=4096)
    for i in range(num_streams):
        stream = simulated_request(f"s{i}", [i, 1], 6000, tenant="light")
        simulation.scheduler.add_request(stream)
    for _ in range(1500):
        simulation.step()
    for i in range(400):
        prompt = [1000 * (i + 1) + j for j in range(400)]
        simulation.scheduler.add_request(simulated_request(f"f{i}", prompt, 100, tenant="flood"))
    light = simulated_request("new", range(5000, 5020), 10, tenant="light")
    simulation.scheduler.add_request(light)
    for _ in range(2):
        simulation.step()
    assert light.status is RequestStatus.RUNNING


def test_a_tenant_without_requests_is_forgotten() -> None:
    core = Core()
    for i in range(50):
        core.add(make_request(f"r{i}", [i], tenant=f"t{i}"))
    core.run()
    assert core.scheduler._queues.fair_share._tenants == {}
    assert core.scheduler._queues.fair_share._debts == {}


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    config = SchedulerConfig(tenant_weights={"a": weight})
    with pytest.raises(InvalidRequest) as refusal:
        Scheduler(config, KVCacheManager(4, 4))
    assert refusal.value.field == "tenant_weights"


def test_half_of_a_prompt_another_tenants_turn_comes_in_between() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    core.add(make_request("long", range(100), tenant="heavy", arrival_ns=1))
    core.step()
    core.add(make_request("short", [1, 2, 3], tenant="light", arrival_ns=2))
    core.add(make_request("mine", [4, 5, 6], tenant="heavy", arrival_ns=3))
    assert shares(core.schedule()) == {"long": 13, "short": 3}


def test_two_prompts_under_way_share_steps_by_what_their_tenants_have_had() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=16)
    long = make_request("long", range(300), tenant="heavy", arrival_ns=1)
    core.add(long)
    for _ in range(4):
        core.step()
    core.add(make_request("short", range(500, 548), tenant="light", arrival_ns=2, max_tokens=1))
    for _ in range(6):  # they take turns from when both want more
        core.step()
    assert ("short", 0) in core.finished
    assert long.num_computed_tokens == (4 + 3) * 16


# ---------------------------------------------------------------- a flood


@pytest.mark.parametrize(
    ("config", "num_blocks", "flood_prompt", "flood_output"),
    [
        (SchedulerConfig(), 2048, 400, 100),
        (SchedulerConfig(), 4096, 2000, 20),  # long prompts
        (SchedulerConfig(max_num_seqs=16), 2048, 20, 400),  # seats held for long
        (SchedulerConfig(), 256, 200, 200),  # blocks are short
        (SchedulerConfig(), 300, 1000, 50),  # both
        (SchedulerConfig(max_num_batched_tokens=512), 1024, 1000, 100),  # long steps
    ],
    ids=["mixed", "long prompts", "long outputs", "few blocks", "both", "long steps"],
)
def test_a_flood_moves_the_p95_queue_time_of_a_light_tenant_by_at_most_two_steps(
    config: SchedulerConfig, num_blocks: int, flood_prompt: int, flood_output: int
) -> None:
    flood = measure_flood(
        config,
        num_blocks,
        flood_prompt=flood_prompt,
        flood_output=flood_output,
        num_flooding=600 * 400 // (flood_prompt + 10 * flood_output),
    )
    assert flood.flooded_seconds > flood.alone_seconds  # it was a flood
    assert flood.steps_later <= 2
