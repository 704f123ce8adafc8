"""The scheduler without a model: requests come by a virtual clock, steps take what a formula says.

    python -m engine_service.simulate --json

prints what scheduling costs a step (`bookkeeping`) and how little a flood of one tenant moves the
queue time of another (`flood`). The scheduler and the KV cache are the real ones; a pretend model
answers every share with some token.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import msgspec

from engine_service.config import SchedulerConfig
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.request import Request, RequestKey
from engine_service.scheduler import Scheduler
from engine_service.scheduler_output import ModelRunnerOutput, SchedulerOutput
from engine_service.step_time import StepTime, num_reads

BLOCK_SIZE: Final = 16  # tokens
CPU_STEP_TIME: Final = StepTime(fixed=0.02, per_token=0.0005, per_read=1e-8)  # of a small model


class _NoGrammars:
    def accept(self, key: RequestKey, token_id: int) -> None:
        raise AssertionError("no request here has a grammar")

    def take_forced_token(self, key: RequestKey) -> int | None:
        return None

    def is_terminated(self, key: RequestKey) -> bool:
        raise AssertionError("no request here has a grammar")

    def release(self, key: RequestKey) -> None:
        raise AssertionError("no request here has a grammar")


@dataclass(slots=True)
class Simulation:
    """Steps a scheduler until all requests are done. Times are in virtual nanoseconds."""

    config: SchedulerConfig
    num_blocks: int
    step_time: StepTime = CPU_STEP_TIME
    now_ns: int = 0
    step_seconds: list[float] = field(default_factory=list)  # how long each took
    step_has_stream: list[bool] = field(default_factory=list)  # somebody waited for its token
    scheduler: Scheduler = field(init=False)
    kv_cache_manager: KVCacheManager = field(init=False)

    def __post_init__(self) -> None:
        self.kv_cache_manager = KVCacheManager(BLOCK_SIZE, self.num_blocks)
        self.scheduler = Scheduler(self.config, self.kv_cache_manager)

    def run(self, requests: Sequence[Request]) -> None:
        """Each is added when the clock has come to its arrival."""
        arrivals = deque(sorted(requests, key=lambda request: request.arrival_ns))
        while arrivals or self.scheduler.has_unfinished_requests():
            if not self.scheduler.has_unfinished_requests():
                self.now_ns = max(self.now_ns, arrivals[0].arrival_ns)
            while arrivals and arrivals[0].arrival_ns <= self.now_ns:
                self.scheduler.add_request(arrivals.popleft())
            self.step()

    def step(self) -> SchedulerOutput:
        self.scheduler.expire(self.now_ns)
        scheduled = self.scheduler.schedule(self.now_ns)
        if not scheduled.scheduled:
            return scheduled
        seconds = self.seconds(scheduled)
        start_ns, self.now_ns = self.now_ns, self.now_ns + round(seconds * 1e9)
        self.step_seconds.append(seconds)
        self.step_has_stream.append(any(s.request.num_output_tokens for s in scheduled.scheduled))
        self.scheduler.launched(scheduled)
        self.scheduler.update_from_output(
            scheduled, pretend(scheduled), start_ns, self.now_ns, _NoGrammars()
        )
        return scheduled

    def seconds(self, scheduled: SchedulerOutput) -> float:
        reads = sum(
            num_reads(share.num_computed_tokens, share.num_scheduled_tokens)
            for share in scheduled.scheduled
        )
        return self.step_time.seconds(scheduled.num_scheduled_tokens, reads)


def pretend(scheduled: SchedulerOutput) -> ModelRunnerOutput:
    """What a model might answer: a token per sampling share."""
    return ModelRunnerOutput({s.request.key: 7 for s in scheduled.scheduled if s.samples})


def make_request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    *,
    tenant: str = "",
    priority: int = 0,
    arrival_ns: int = 0,
) -> Request:
    return Request(
        request_id=request_id,
        index=0,
        prompt_token_ids=list(prompt_token_ids),
        sampling=SamplingParams(),
        stopping=StoppingCriteria(max_tokens=max_tokens),
        tenant=tenant,
        priority=priority,
        arrival_ns=arrival_ns,
    )


# ---------------------------------------------------------------- what scheduling costs


class Bookkeeping(msgspec.Struct, frozen=True):
    """Of schedule() and update_from_output(), per running request and step."""

    decode_only_microseconds: float  # one tenant, no block is needed
    mixed_microseconds: float  # eight tenants, priorities, blocks needed and requests that end
    # and start in every step


def measure_bookkeeping(num_running: int = 256, num_steps: int = 200) -> Bookkeeping:
    decode_only = _cost(num_running, num_steps, num_tenants=1, num_waiting=0)
    mixed = _cost(num_running, num_steps, num_tenants=8, num_waiting=8 * num_running)
    return Bookkeeping(decode_only_microseconds=decode_only, mixed_microseconds=mixed)


def _cost(num_running: int, num_steps: int, num_tenants: int, num_waiting: int) -> float:
    """The median over steps, in CPU time: what else the machine does is not counted."""
    config = SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=64 * num_running)
    simulation = Simulation(config, num_blocks=num_running * (10 + num_steps // BLOCK_SIZE))
    scheduler = simulation.scheduler
    for i in range(num_running + num_waiting):
        mixed = i * 7 % 64 if num_waiting else 0
        request = make_request(
            f"r{i}",
            _distinct(i, 33 + mixed),
            max_tokens=16 + mixed if num_waiting else num_steps + 2,
            tenant=f"t{i % num_tenants}",
            priority=i % num_tenants % 3,
            arrival_ns=i,
        )
        scheduler.add_request(request)
    simulation.step()
    costs = []
    for _ in range(num_steps):
        start_ns = time.thread_time_ns()
        scheduled = scheduler.schedule(simulation.now_ns)
        middle_ns = time.thread_time_ns()
        result = pretend(scheduled)
        resumed_ns = time.thread_time_ns()
        scheduler.launched(scheduled)
        scheduler.update_from_output(scheduled, result, 0, 1, _NoGrammars())
        end_ns = time.thread_time_ns()
        costs.append((end_ns - resumed_ns + middle_ns - start_ns) / len(scheduled.scheduled))
    return median(costs) / 1000


# ---------------------------------------------------------------- what a flood does to others


class Flood(msgspec.Struct, frozen=True):
    """Queue time of a light tenant's requests; all are 95th percentiles."""

    alone_seconds: float
    flooded_seconds: float
    flooded_step_seconds: float  # of a step with the flood: about that of a full one

    @property
    def steps_later(self) -> float:
        return (self.flooded_seconds - self.alone_seconds) / self.flooded_step_seconds


def measure_flood(
    config: SchedulerConfig,
    num_blocks: int,
    *,
    flood_prompt: int,
    flood_output: int,
    num_flooding: int,
    num_light: int = 40,
) -> Flood:
    """A light tenant sends one request a second, with and without another's flood before it."""
    light = [
        ([1_000_000 + 100 * i + j for j in range(60)], round((0.5 + i) * 1e9))
        for i in range(num_light)
    ]

    def light_requests() -> list[Request]:
        return [
            make_request(f"light{i}", prompt, 8, tenant="light", arrival_ns=arrival_ns)
            for i, (prompt, arrival_ns) in enumerate(light)
        ]

    alone, among = light_requests(), light_requests()
    Simulation(config, num_blocks).run(alone)
    flood = [
        make_request(f"flood{i}", _distinct(i, flood_prompt), flood_output, tenant="flood")
        for i in range(num_flooding)
    ]
    flooded = Simulation(config, num_blocks)
    flooded.run([*flood, *among])
    return Flood(_p95_queue(alone), _p95_queue(among), _p95(flooded.step_seconds))


def _distinct(i: int, length: int) -> list[int]:
    """A prompt that shares no prefix with another's."""
    return [10_000 * i + j for j in range(length)]


def _p95_queue(requests: Sequence[Request]) -> float:
    return _p95([(r.first_scheduled_ns - r.arrival_ns) * 1e-9 for r in requests])


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    parser.add_argument("--num-running", type=int, default=256, help="requests that run at once")
    arguments = parser.parse_args()
    cost = measure_bookkeeping(arguments.num_running)
    flood = measure_flood(
        SchedulerConfig(), 2048, flood_prompt=400, flood_output=100, num_flooding=400
    )
    result = {
        "num_running": arguments.num_running,
        "bookkeeping": msgspec.to_builtins(cost),
        "flood": {**msgspec.to_builtins(flood), "steps_later": flood.steps_later},
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"decode only   {cost.decode_only_microseconds:6.2f} us per request and step")
    print(f"mixed         {cost.mixed_microseconds:6.2f} us per request and step")
    print(f"flood         {flood.steps_later:6.2f} steps later in the queue")


if __name__ == "__main__":
    main()
