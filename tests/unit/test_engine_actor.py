"""The actor with a scripted core: who is in the table, what is posted, who is told what."""

from __future__ import annotations

import asyncio
import time

import pytest

from engine_service.config import SchedulerConfig
from engine_service.engine_actor import EngineActor
from engine_service.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    InternalError,
    InvalidRequest,
    QueueFull,
    RequestIdInUse,
)
from engine_service.live_request import RequestStream
from engine_service.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CoreStats,
    Failure,
    Finish,
    FinishReason,
    FlushPrefixCache,
    Frame,
    PrefixCacheFlushed,
    Ready,
    RequestOutput,
    RequestTiming,
    SamplingParams,
    Shutdown,
    StepFrame,
    StoppingCriteria,
)
from engine_service.service_metrics import ServiceMetrics

pytestmark = pytest.mark.usefixtures("virtual_clock")

READY = Ready(
    7, "Llama", 100, 50, (2,), 30, 8, 64, "cpu", "float32", "none", "float32", False, {}, "w"
)
ABORTED = Finish(FinishReason.ABORT, RequestTiming(arrival_ns=1, finished_ns=2))


class Connection:
    """Records each frame of commands."""

    def __init__(self) -> None:
        self.sent: list[list[Command]] = []

    def send(self, commands: list[Command]) -> None:
        self.sent.append(commands)

    async def receive(self) -> Frame | None:
        raise AssertionError("frames are the supervisor's to read")

    async def close(self) -> None:
        raise AssertionError("the connection is the supervisor's to close")


class Bench:
    def __init__(self, limits: SchedulerConfig) -> None:
        self.metrics = ServiceMetrics("tiny")
        self.actor = EngineActor(limits, self.metrics, stall_timeout_seconds=0.2)
        self.connection = Connection()
        self.ended: list[tuple[int, FinishReason]] = []
        self.first_tokens: list[int] = []
        self.lost: list[int] = []
        self.actor.core_started(self.connection, READY)

    def submit(
        self, request_id: str = "a", n: int = 1, prompt: int = 5, deadline_seconds: float = 0
    ) -> RequestStream:
        now_ns = time.monotonic_ns()
        request = AddRequest(
            request_id,
            list(range(prompt)),
            SamplingParams(),
            StoppingCriteria(max_tokens=4),
            n=n,
            arrival_ns=now_ns,
            deadline_ns=now_ns + int(deadline_seconds * 1e9) if deadline_seconds else 0,
        )
        return self.actor.submit(request, self)

    def first_token(self, index: int, computed_ns: int, received_ns: int) -> None:
        assert computed_ns <= received_ns
        self.first_tokens.append(index)

    def sample_finished(self, index: int, finish: Finish) -> None:
        self.ended.append((index, finish.reason))

    def sample_lost(self, index: int) -> None:
        self.lost.append(index)

    def answer(self, *outputs: RequestOutput, stats: CoreStats | None = None) -> None:
        now_ns = time.monotonic_ns()
        self.actor.handle(StepFrame(1, now_ns, now_ns, 4, list(outputs), stats or CoreStats()))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "tiny", **labels})


@pytest.fixture
def bench() -> Bench:
    return Bench(SchedulerConfig(max_num_queued_reqs=4))


def finish(reason: FinishReason = FinishReason.LENGTH, failure: Failure | None = None) -> Finish:
    now_ns = time.monotonic_ns()
    return Finish(reason, RequestTiming(now_ns, 0, now_ns, now_ns, now_ns), failure=failure)


async def test_commands_of_one_loop_iteration_make_one_frame(bench: Bench) -> None:
    stream = bench.submit("a")
    bench.submit("b")
    stream.close()
    assert bench.connection.sent == []
    await asyncio.sleep(0)
    ((first, second, third),) = bench.connection.sent
    assert isinstance(first, AddRequest)
    assert isinstance(second, AddRequest)
    assert third == AbortRequest("a")


async def test_a_stream_reads_until_each_sample_ended(bench: Bench) -> None:
    stream = bench.submit(n=2)
    bench.answer(RequestOutput("a", 0, [1], num_prefilled_tokens=5))
    bench.answer(RequestOutput("a", 0, [2], finish=finish()))
    (events,) = await stream.take()
    assert events.token_ids == [1, 2]
    states = [stream.finished]
    assert bench.actor.num_requests == 1
    bench.answer(RequestOutput("a", 1, [3], finish=finish(FinishReason.STOP)))
    assert bench.actor.num_requests == 0
    states.append(stream.finished)  # not yet read
    await stream.take()
    assert [*states, stream.finished] == [False, False, True]
    assert bench.ended == [(0, FinishReason.LENGTH), (1, FinishReason.STOP)]


async def test_a_request_is_forgotten_only_when_the_core_acknowledged(bench: Bench) -> None:
    stream = bench.submit(n=2)
    stream.close()
    assert bench.actor.num_requests == 1
    with pytest.raises(RequestIdInUse):
        bench.submit("a")
    bench.answer(RequestOutput("a", 0, finish=ABORTED))
    assert bench.actor.num_requests == 1
    bench.answer(RequestOutput("a", 1, finish=ABORTED))
    assert bench.actor.num_requests == 0
    bench.submit("a")


async def test_closing_a_finished_stream_spares_a_new_request_of_its_id(bench: Bench) -> None:
    old = bench.submit("a")
    bench.answer(RequestOutput("a", 0, [1], finish=finish()))
    bench.submit("a")
    old.close()
    await asyncio.sleep(0)
    assert not any(isinstance(c, AbortRequest) for sent in bench.connection.sent for c in sent)


async def test_abort_leaves_alone_what_is_unknown_or_finished(bench: Bench) -> None:
    bench.submit("a", n=2)
    bench.answer(RequestOutput("a", 0, [1], finish=finish()))
    await asyncio.sleep(0)
    bench.connection.sent.clear()
    bench.actor.abort("b")
    bench.actor.abort("a", (0, 9))
    await asyncio.sleep(0)
    assert bench.connection.sent == []
    bench.actor.abort("a", (0, 1))
    await asyncio.sleep(0)
    assert bench.connection.sent == [[AbortRequest("a", (0, 1))]]


async def test_the_queue_counts_samples_until_their_first_step(bench: Bench) -> None:
    bench.submit("a", n=3)
    with pytest.raises(QueueFull) as caught:
        bench.submit("b", n=2)
    assert caught.value.retry_after_seconds is not None
    assert bench.value("vllm:admission_rejections_total", reason="queue_full") == 1
    bench.answer(RequestOutput("a", 1, num_prefilled_tokens=5))
    bench.submit("b", n=2)
    with pytest.raises(QueueFull):
        bench.submit("c")
    bench.answer(RequestOutput("a", 0, finish=ABORTED), RequestOutput("a", 2, finish=ABORTED))
    bench.submit("c", n=2)


async def test_a_sample_that_fails_fails_the_call_and_ends_its_siblings(bench: Bench) -> None:
    stream = bench.submit(n=2)
    await asyncio.sleep(0)
    bench.connection.sent.clear()
    failure = Failure("INVALID_VALUE", "bad schema", "structured_output.json_schema")
    bench.answer(
        RequestOutput("a", 1, [4]),
        RequestOutput("a", 0, finish=finish(FinishReason.ERROR, failure)),
    )
    assert [events.token_ids for events in await stream.take()] == [[4]]
    with pytest.raises(InvalidRequest, match="bad schema") as caught:
        await stream.take()
    assert caught.value.field == "structured_output.json_schema"
    await asyncio.sleep(0)
    assert bench.connection.sent == [[AbortRequest("a")]]
    bench.answer(RequestOutput("a", 1, finish=ABORTED))
    assert bench.actor.num_requests == 0
    assert bench.value("vllm:request_success_total", finished_reason="error") == 1


async def test_an_unknown_reason_is_an_internal_error(bench: Bench) -> None:
    stream = bench.submit()
    bench.answer(RequestOutput("a", 0, finish=finish(FinishReason.ERROR, Failure("NEW", "?"))))
    with pytest.raises(InternalError):
        await stream.take()


async def test_the_observer_hears_of_first_tokens_ends_and_losses(bench: Bench) -> None:
    bench.submit("a", n=3)
    bench.answer(RequestOutput("a", 0, [1]), RequestOutput("a", 2, num_prefilled_tokens=5))
    bench.answer(RequestOutput("a", 0, [2]), RequestOutput("a", 1, [3], finish=finish()))
    assert bench.first_tokens == [0, 1]
    assert bench.ended == [(1, FinishReason.LENGTH)]
    bench.actor.core_lost(retry_after_seconds=None)
    assert bench.lost == [0, 2]


async def test_the_cores_death_fails_all_and_frees_everything(bench: Bench) -> None:
    streams = [bench.submit(name, n=2) for name in "ab"]
    bench.answer(RequestOutput("a", 0, [1], num_prefilled_tokens=5))
    bench.actor.core_lost(retry_after_seconds=2.0)
    assert bench.actor.num_requests == 0
    assert [events.token_ids for events in await streams[0].take()] == [[1]]
    for stream in streams:
        with pytest.raises(EngineUnavailable) as caught:
            await stream.take()
        assert caught.value.retry_after_seconds == 2.0
        stream.close()
    with pytest.raises(EngineUnavailable):
        bench.submit("c")
    assert bench.value("vllm:request_success_total", finished_reason="error") == 4

    fresh = Connection()
    bench.actor.core_started(fresh, READY)
    bench.submit("a", n=4)
    await asyncio.sleep(0)
    assert [len(sent) for sent in fresh.sent] == [1]


async def test_silence_makes_it_unavailable_and_a_frame_available_again(bench: Bench) -> None:
    assert bench.actor.unavailable() is None
    await asyncio.sleep(0.25)
    with pytest.raises(EngineUnavailable, match="respond"):
        bench.submit()
    bench.answer()
    bench.submit()


async def test_draining_refuses_the_new_and_waits_for_the_old(bench: Bench) -> None:
    stream = bench.submit()
    bench.actor.drain()
    with pytest.raises(EngineUnavailable, match="shutting down"):
        bench.submit("b")
    waiting = asyncio.create_task(bench.actor.wait_idle())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    bench.answer(RequestOutput("a", 0, [1], finish=finish()))
    await asyncio.wait_for(waiting, 1)
    assert [events.token_ids for events in await stream.take()] == [[1]]
    assert bench.actor.shut_down_core()
    assert bench.connection.sent[-1] == [Shutdown()]


# ---------------------------------------------------------------- deadlines


async def test_the_queue_timeout_fails_what_has_not_started() -> None:
    bench = Bench(SchedulerConfig(queue_timeout_seconds=0.05))
    waiting, started, left = bench.submit("a", n=2), bench.submit("b", n=2), bench.submit("c")
    bench.answer(RequestOutput("b", 1, num_prefilled_tokens=5))
    left.close()
    await asyncio.sleep(0)
    bench.connection.sent.clear()
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await asyncio.wait_for(waiting.take(), 1)
    await asyncio.sleep(0.01)
    assert AbortRequest("a") in [c for sent in bench.connection.sent for c in sent]
    assert AbortRequest("b") not in [c for sent in bench.connection.sent for c in sent]
    bench.answer(RequestOutput("a", 0, finish=ABORTED), RequestOutput("a", 1, finish=ABORTED))
    assert bench.value("vllm:request_success_total", finished_reason="error") == 2
    assert bench.value("vllm:request_queue_time_seconds_count") == 2
    assert [events.index for events in await started.take()] == [1]


async def test_a_caller_that_leaves_at_its_deadline_counts_as_an_error(bench: Bench) -> None:
    late = bench.submit("late", deadline_seconds=0.01)
    early = bench.submit("early", deadline_seconds=60)
    await asyncio.sleep(0.02)
    late.close()
    early.close()
    bench.answer(
        RequestOutput("late", 0, finish=ABORTED), RequestOutput("early", 0, finish=ABORTED)
    )
    assert bench.value("vllm:request_success_total", finished_reason="error") == 1
    assert bench.value("vllm:request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize(
    ("limits", "deadline_seconds"),
    [
        (SchedulerConfig(max_queue_wait_seconds=0.005), 0),
        (SchedulerConfig(queue_timeout_seconds=0.005), 0),
        (SchedulerConfig(), 0.005),
    ],
)
async def test_a_predicted_wait_that_is_too_long_is_refused(
    limits: SchedulerConfig, deadline_seconds: float
) -> None:
    bench = Bench(limits)
    bench.submit("a", n=3)
    await asyncio.sleep(0.01)
    bench.answer(RequestOutput("a", 0, [1]))  # one in 10 ms, two wait
    with pytest.raises(QueueFull) as caught:
        bench.submit("b", deadline_seconds=deadline_seconds)
    assert caught.value.retry_after_seconds is not None
    assert bench.value("vllm:admission_rejections_total", reason="queue_wait") == 1
    assert bench.value("vllm:admission_rejections_total", reason="queue_full") == 0
    bench.answer(RequestOutput("a", 1, [1]), RequestOutput("a", 2, [1]))
    bench.submit("b", deadline_seconds=deadline_seconds)


# ---------------------------------------------------------------- control


async def test_flushes_are_answered_in_order(bench: Bench) -> None:
    flushes = [asyncio.create_task(bench.actor.flush_prefix_cache()) for _ in range(3)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert bench.connection.sent == [[FlushPrefixCache()] * 3]
    flushes[1].cancel()
    await asyncio.sleep(0)
    for num_blocks in (7, 0, 2):
        bench.actor.prefix_cache_flushed(PrefixCacheFlushed(num_blocks, CoreStats()))
    assert (await flushes[0], await flushes[2]) == (7, 2)


async def test_a_flush_ends_with_the_core(bench: Bench) -> None:
    flush = asyncio.create_task(bench.actor.flush_prefix_cache())
    await asyncio.sleep(0)
    bench.actor.core_lost(retry_after_seconds=1)
    with pytest.raises(EngineUnavailable):
        await flush
    with pytest.raises(EngineUnavailable):
        await bench.actor.flush_prefix_cache()


async def test_an_answer_to_a_flush_that_has_failed_is_ignored(bench: Bench) -> None:
    flush = asyncio.create_task(bench.actor.flush_prefix_cache())
    await asyncio.sleep(0)
    bench.actor.drain()
    bench.actor.fail_all(EngineUnavailable("the engine is shutting down"))
    bench.actor.prefix_cache_flushed(PrefixCacheFlushed(3, CoreStats(num_steps=8)))
    with pytest.raises(EngineUnavailable):
        await flush
    assert bench.actor.stats.num_steps == 8


# ---------------------------------------------------------------- metrics


async def test_gaps_between_tokens_fall_into_their_buckets(bench: Bench) -> None:
    for gap_seconds in (0.005, 0.006, 0.02, 100.0):
        bench.metrics.next_token(round(gap_seconds * 1e9))
    name = "vllm:inter_token_latency_seconds"
    for bound, count in {"0.005": 1, "0.01": 2, "0.025": 3, "80.0": 3, "+Inf": 4}.items():
        assert bench.value(f"{name}_bucket", le=bound) == count, bound
    assert bench.value(f"{name}_count") == 4
    assert bench.value(f"{name}_sum") == pytest.approx(100.031)


async def test_metrics_of_one_request(bench: Bench) -> None:
    bench.submit(n=2)
    bench.answer(RequestOutput("a", 0, [1], num_prefilled_tokens=5))
    bench.answer(RequestOutput("a", 0, [2]))
    bench.answer(
        RequestOutput("a", 0, [3], finish=finish()),
        RequestOutput("a", 1, finish=ABORTED),  # it never left the queue
        stats=CoreStats(num_running=3, total_blocks=10, used_blocks=4, num_preemptions=2),
    )
    for name, count in {
        "time_to_first_token_seconds": 1,
        "inter_token_latency_seconds": 2,
        "request_time_per_output_token_seconds": 1,
        "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 2,
        "request_prefill_time_seconds": 1,
        "request_decode_time_seconds": 1,
        "request_prompt_tokens": 2,
        "request_generation_tokens": 2,
        "iteration_tokens_total": 3,
    }.items():
        assert bench.value(f"vllm:{name}_count") == count, name
    assert bench.value("vllm:request_generation_tokens_sum") == 3
    assert bench.value("vllm:request_success_total", finished_reason="length") == 1
    assert bench.value("vllm:request_success_total", finished_reason="abort") == 1
    assert bench.value("vllm:num_requests_running") == 3
    assert bench.value("vllm:kv_cache_usage_perc") == 0.4
    assert bench.value("vllm:num_preemptions_total") == 2
