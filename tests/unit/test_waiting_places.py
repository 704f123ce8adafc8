"""Short prompts overtake long ones, and for how long at most."""

from __future__ import annotations

import pytest

from engine_service.config import SchedulerConfig
from engine_service.request import Request
from engine_service.simulate import CPU_STEP_TIME, Simulation, make_request
from engine_service.step_time import num_reads
from engine_service.waiting_queue import PATIENCE

LONG = 1500  # tokens
ALONE_SECONDS = CPU_STEP_TIME.added_seconds(LONG, num_reads(0, LONG))


def warm(config: SchedulerConfig) -> Simulation:
    """One that knows what a step costs."""
    simulation = Simulation(config, num_blocks=4096)
    simulation.run([make_request("w", range(700), 30), make_request("v", [7] * 300, 30)])
    return simulation


def after(simulation: Simulation, seconds: float) -> int:
    return simulation.now_ns + round(seconds * 1e9)


def ttft_seconds(request: Request) -> float:
    return (request.first_token_ns - request.arrival_ns) * 1e-9


@pytest.mark.parametrize("target_itl_ms", [None, 60.0])
def test_a_short_prompt_waits_for_no_long_one_that_came_before(
    target_itl_ms: float | None,
) -> None:
    simulation = warm(SchedulerConfig(max_num_batched_tokens=256, target_itl_ms=target_itl_ms))
    longs = [
        make_request(
            f"long-{i}", range(9000 * i, 9000 * i + LONG), 2, arrival_ns=after(simulation, 0)
        )
        for i in (1, 2)
    ]
    short = make_request("short", range(60), 4, arrival_ns=after(simulation, 0.2))
    simulation.run([*longs, short])
    assert ttft_seconds(short) < 0.3 < ALONE_SECONDS
    assert longs[0].first_token_ns < longs[1].first_token_ns  # of equals, who came first
    assert ttft_seconds(longs[0]) < 1.5 * ALONE_SECONDS


def test_a_long_prompt_is_overtaken_for_a_while_and_then_by_nobody() -> None:
    simulation = warm(SchedulerConfig(max_num_batched_tokens=64))
    long = make_request("long", range(9000, 9000 + LONG), 2, arrival_ns=after(simulation, 0))
    shorts = [  # more than the machine can do, for longer than a long one waits
        make_request(
            f"s{i}", range(100 * i, 100 * i + 64), 1, arrival_ns=after(simulation, i * 0.05)
        )
        for i in range(round(20 * PATIENCE * ALONE_SECONDS * 1.5))
    ]
    simulation.run([long, *shorts])
    overtaken_by = [s for s in shorts if s.first_token_ns < long.first_token_ns]
    assert overtaken_by
    last_ns = max(s.arrival_ns for s in overtaken_by)
    waited = (last_ns - long.arrival_ns) * 1e-9
    assert 0.5 * PATIENCE * ALONE_SECONDS < waited < 1.5 * PATIENCE * ALONE_SECONDS


def test_a_cached_prefix_counts_for_no_length() -> None:
    simulation = warm(SchedulerConfig(max_num_batched_tokens=256))
    known = make_request("known", range(9000, 9000 + LONG), 2, arrival_ns=after(simulation, 0))
    simulation.run([known])
    cached = make_request(
        "cached", [*range(9000, 9000 + LONG), 5, 6], 4, arrival_ns=after(simulation, 0)
    )
    other = make_request("other", range(30000, 30200), 4, arrival_ns=after(simulation, 0))
    simulation.run([other, cached])
    assert cached.num_cached_tokens > LONG - 32
    assert cached.place < other.place
