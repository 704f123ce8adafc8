"""What a step costs, learnt from steps; and prompts that leave running streams their pace."""

from __future__ import annotations

import random
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.config import SchedulerConfig
from engine_service.errors import InvalidRequest
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.prefill_pace import MIN_PREFILL_TOKENS, StepRoom
from engine_service.request import Request
from engine_service.scheduler import Scheduler
from engine_service.simulate import CPU_STEP_TIME, Simulation, make_request
from engine_service.step_time import StepTime, StepTimeModel, num_reads
from tests.core_fakes import Core, shares
from tests.core_fakes import make_request as core_request


def learn(
    truth: StepTime, rng: random.Random, noise: float = 0.0, num_steps: int = 200
) -> StepTime:
    model = StepTimeModel()
    for _ in range(num_steps):
        tokens = rng.choice([1, 4, 8, 30, 64, 128])
        reads = num_reads(rng.randrange(2000), tokens)
        seconds = truth.seconds(tokens, reads) * (1 + noise * rng.uniform(-1, 1))
        if noise and rng.random() < 0.05:
            seconds += rng.uniform(0.2, 5)  # a stall
        model.observe(tokens, reads, seconds)
    assert model.step_time is not None
    return model.step_time


def test_reads_are_pairs_of_a_token_and_one_it_attends_to() -> None:
    assert num_reads(0, 4) == 1 + 2 + 3 + 4
    assert num_reads(10, 1) == 11
    assert num_reads(10, 3) == 11 + 12 + 13


def test_the_true_line_is_found() -> None:
    found = learn(CPU_STEP_TIME, random.Random(1))
    assert found.fixed == pytest.approx(CPU_STEP_TIME.fixed, rel=1e-3)
    assert found.per_token == pytest.approx(CPU_STEP_TIME.per_token, rel=1e-3)
    assert found.per_read == pytest.approx(CPU_STEP_TIME.per_read, rel=1e-3)


def test_stalls_and_noise_bend_it_little() -> None:
    for seed in range(10):
        found = learn(CPU_STEP_TIME, random.Random(seed), noise=0.05)
        for tokens, computed in ((8, 500), (64, 1000), (128, 100)):
            reads = num_reads(computed, tokens)
            truth = CPU_STEP_TIME.seconds(tokens, reads)
            assert found.seconds(tokens, reads) == pytest.approx(truth, rel=0.1)


def test_a_long_stretch_of_decoding_does_not_make_it_forget_what_a_chunk_costs() -> None:
    model = StepTimeModel()
    for tokens in [128, 100, 64, 30] * 10 + [8] * 5000:
        reads = num_reads(500, tokens)
        model.observe(tokens, reads, CPU_STEP_TIME.seconds(tokens, reads))
    assert model.step_time is not None
    reads = num_reads(0, 128)
    truth = CPU_STEP_TIME.seconds(128, reads)
    assert model.step_time.seconds(128, reads) == pytest.approx(truth, rel=0.05)


def test_it_follows_a_machine_that_became_slower() -> None:
    model = StepTimeModel()
    for scale in (1, 5):
        for i in range(300):
            tokens = (8, 40, 128)[i % 3]
            reads = num_reads(300, tokens)
            model.observe(tokens, reads, scale * CPU_STEP_TIME.seconds(tokens, reads))
    assert model.step_time is not None
    truth = 5 * CPU_STEP_TIME.seconds(40, num_reads(300, 40))
    assert model.step_time.seconds(40, num_reads(300, 40)) == pytest.approx(truth, rel=0.05)


def test_steps_that_are_all_the_same_are_no_reason_to_fail() -> None:
    model = StepTimeModel()
    for _ in range(50):
        model.observe(1, 10, 0.01)
    assert model.step_time is not None
    assert model.step_time.seconds(1, 10) == pytest.approx(0.01, rel=0.01)
    assert min(model.step_time.fixed, model.step_time.per_token, model.step_time.per_read) >= 0


def seconds_up_to(most: float) -> st.SearchStrategy[float]:
    """None at all, or what a clock could tell from none."""
    return st.just(0.0) | st.floats(1e-12, most)


@given(
    seconds_up_to(1),
    seconds_up_to(1e-2),
    seconds_up_to(1e-5),
    seconds_up_to(10),
    st.integers(0, 100_000),
)
def test_tokens_within_a_time_take_that_time(
    fixed: float, per_token: float, per_read: float, seconds: float, computed: int
) -> None:
    step_time = StepTime(fixed, per_token, per_read)
    tokens = int(min(step_time.tokens_within(seconds, computed), 10**6))
    assert tokens >= 0
    assert step_time.added_seconds(tokens, num_reads(computed, tokens)) <= seconds * (1 + 1e-9)
    if tokens < 10**6 and seconds > 0:
        more = step_time.added_seconds(tokens + 1, num_reads(computed, tokens + 1))
        assert more >= seconds * (1 - 1e-9)


# ---------------------------------------------------------------- pace


def streams_and_prompts(rng: random.Random, num_prompts: int = 12) -> list[Request]:
    streams = [make_request(f"s{i}", [i, 1], 400, arrival_ns=i) for i in range(6)]
    prompts = [
        make_request(
            f"p{i}",
            [1000 * i + j for j in range(rng.randrange(200, 900))],
            4,
            arrival_ns=int(rng.uniform(0.5, 12) * 1e9),
        )
        for i in range(num_prompts)
    ]
    return [*streams, *prompts]


@settings(max_examples=12)
@given(st.integers(0, 2**32), st.sampled_from([30.0, 45.0, 60.0]))
def test_with_a_linear_step_time_streams_keep_their_pace_after_a_warm_up(
    seed: int, target_itl_ms: float
) -> None:
    rng = random.Random(seed)
    config = SchedulerConfig(max_num_batched_tokens=256, target_itl_ms=target_itl_ms)
    simulation = Simulation(config, num_blocks=2048)
    simulation.run([make_request("w", range(700), 30), make_request("v", [7] * 300, 30)])
    num_warm_up = len(simulation.step_seconds)
    start_ns = simulation.now_ns
    requests = streams_and_prompts(rng)
    for request in requests:
        request.arrival_ns += start_ns
    simulation.run(requests)
    floor = CPU_STEP_TIME.seconds(MIN_PREFILL_TOKENS + 6, num_reads(1000, MIN_PREFILL_TOKENS + 6))
    limit = max(target_itl_ms / 1000, floor) * 1.05
    paced = [
        seconds
        for seconds, has_stream in zip(
            simulation.step_seconds[num_warm_up:],
            simulation.step_has_stream[num_warm_up:],
            strict=True,
        )
        if has_stream
    ]
    assert max(paced) <= limit
    assert median(paced) < max(paced)  # there were prompts
    assert all(request.status.is_finished for request in requests)


def test_without_a_target_the_same_prompts_break_the_pace() -> None:
    simulation = Simulation(SchedulerConfig(max_num_batched_tokens=256), num_blocks=2048)
    simulation.run(streams_and_prompts(random.Random(0)))
    assert max(simulation.step_seconds) > 0.1


def test_a_target_that_no_step_can_keep_leaves_prompts_a_little_of_each() -> None:
    config = SchedulerConfig(target_itl_ms=1)
    simulation = Simulation(config, num_blocks=256)
    simulation.run([make_request("w", range(500), 20)])
    stream = make_request("s", [1, 2], 200, arrival_ns=simulation.now_ns)
    prompt = make_request("p", range(5000, 5240), 2, arrival_ns=simulation.now_ns + 50_000_000)
    simulation.run([stream, prompt])
    chunks = [chunk.num_tokens for chunk in prompt.prefill_chunks]
    assert set(chunks) == {MIN_PREFILL_TOKENS}


def test_alone_a_prompt_gets_whole_steps_whatever_the_target() -> None:
    config = SchedulerConfig(target_itl_ms=1)
    simulation = Simulation(config, num_blocks=256)
    simulation.run([make_request("w", range(500), 20)])
    prompt = make_request("p", range(5000, 5256), 1, arrival_ns=simulation.now_ns)
    simulation.run([prompt])
    assert [chunk.num_tokens for chunk in prompt.prefill_chunks] == [128, 128]


def test_room_is_the_smallest_of_its_limits() -> None:
    room = StepRoom(token_budget=100, longest_chunk=60)
    assert room.chunk(0, 500) == 60
    assert room.chunk(0, 5) == 5
    room.step_time, room.seconds_left = StepTime(0.01, 0.001, 0.0), 0.03
    assert room.chunk(0, 500) == 30
    room.take_chunk(0, 30)
    assert room.chunk(0, 500) == 0
    assert room.token_budget == 70


def test_a_long_prompt_takes_no_more_than_the_threshold_of_a_step() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=32, long_prefill_token_threshold=12)
    core.add(core_request("long", range(100), arrival_ns=1))
    core.add(core_request("short", [1, 2, 3], arrival_ns=2))
    core.add(core_request("other", range(200, 300), arrival_ns=3))
    assert shares(core.schedule()) == {"long": 12, "short": 3, "other": 12}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (SchedulerConfig(long_prefill_token_threshold=-1), "long_prefill_token_threshold"),
        (SchedulerConfig(target_itl_ms=0), "target_itl_ms"),
    ],
)
def test_limits_that_make_no_sense_are_refused(config: SchedulerConfig, field: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        Scheduler(config, KVCacheManager(4, 4))
    assert refusal.value.field == field
