"""The scheduler's simulation: what it prints, and what scheduling may cost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine_service.config import SchedulerConfig
from engine_service.request import RequestStatus
from engine_service.simulate import CPU_STEP_TIME, Simulation, make_request, measure_bookkeeping
from engine_service.step_time import num_reads


def test_the_clock_moves_by_what_the_steps_take() -> None:
    simulation = Simulation(SchedulerConfig(), num_blocks=64)
    late = make_request("late", [1, 2, 3], 1, arrival_ns=5_000_000_000)
    first = make_request("first", [4, 5], 2)
    simulation.run([late, first])
    steps = [(2, num_reads(0, 2)), (1, num_reads(2, 1)), (3, num_reads(0, 3))]
    assert simulation.step_seconds == [CPU_STEP_TIME.seconds(*step) for step in steps]
    assert late.first_scheduled_ns == 5_000_000_000
    assert late.finished_ns == 5_000_000_000 + round(simulation.step_seconds[-1] * 1e9)
    assert first.status is RequestStatus.FINISHED_LENGTH


def test_it_prints_one_json_object() -> None:
    command = [sys.executable, "-m", "engine_service.simulate", "--json", "--num-running=16"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    result = json.loads(printed)
    assert set(result) == {"num_running", "bookkeeping", "flood"}
    assert set(result["bookkeeping"]) == {"decode_only_microseconds", "mixed_microseconds"}
    assert result["flood"]["steps_later"] <= 2


@pytest.mark.slow
def test_scheduling_costs_microseconds_per_request_and_step() -> None:
    """4 to 6.5, and 6 to 10 with everything, by the hour on one shared machine."""
    costs = [measure_bookkeeping(num_running=256, num_steps=100) for _ in range(5)]
    assert min(cost.decode_only_microseconds for cost in costs) <= 10
    assert min(cost.mixed_microseconds for cost in costs) <= 20
