"""Whoever leaves holds nothing: cancelled calls, vanished clients, deadlines, a full queue."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from engine_service.config import CacheConfig
from engine_service.service import EngineService
from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import (
    ENDLESS,
    LONG_CONTEXT,
    ROOM_FOR_ENDLESS,
    Answer,
    Client,
    Engine,
    client,
    engine_process,
    next_event,
    request,
    service_config,
)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama", **LONG_CONTEXT)


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = ("--max-num-seqs=8", "--max-num-queued-reqs=32", ROOM_FOR_ENDLESS)
    with engine_process(model_dir, tmp_path_factory.mktemp("engine"), *flags) as running:
        yield running


@pytest.fixture
async def engine_client(engine: Engine) -> AsyncIterator[Client]:
    async with client(engine.grpc) as connected:
        yield connected
        await connected.wait_idle(20)


async def begin(
    engine_client: Client, message: pb.GenerateRequest, num_deltas: int = 1
) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]:
    """A call that has received so many deltas."""
    call = engine_client.engine.Generate(message)
    while num_deltas:
        event = await call.read()
        assert isinstance(event, pb.GenerateEvent)
        num_deltas -= event.HasField("delta")
    return call


async def test_200_cancelled_calls_leave_nothing(engine_client: Client) -> None:
    for _ in range(25):
        calls = await asyncio.gather(
            *(begin(engine_client, request(prompt=[i, 5, 6], max_tokens=ENDLESS)) for i in range(8))
        )
        for call in calls:
            call.cancel()
    load = await engine_client.wait_idle(20)
    await asyncio.sleep(0.2)
    assert (await engine_client.load()).generated_tokens == load.generated_tokens


async def test_every_sample_of_a_cancelled_call_ends(engine_client: Client) -> None:
    waits: list[float] = []
    for _ in range(10):
        call = await begin(engine_client, request(n=4, max_tokens=ENDLESS))
        began = time.monotonic()
        call.cancel()
        await engine_client.wait_idle(20)
        waits.append(time.monotonic() - began)
    assert statistics.median(waits) < 1


async def test_a_call_cancelled_before_it_ran_is_forgotten(engine_client: Client) -> None:
    running = [
        await begin(engine_client, request(prompt=[i, 7], max_tokens=ENDLESS)) for i in range(8)
    ]
    waiting = [
        engine_client.engine.Generate(request(prompt=[i, 8], max_tokens=ENDLESS)) for i in range(8)
    ]
    for call in waiting:
        event = await call.read()
        assert isinstance(event, pb.GenerateEvent)
        assert event.HasField("accepted")
    await engine_client.wait_load(lambda load: load.num_waiting == 8, 20)
    prompt_tokens = (await engine_client.load()).prompt_tokens
    for call in waiting:
        call.cancel()
    await engine_client.wait_load(lambda load: load.num_waiting == 0, 20)
    assert (await engine_client.load()).prompt_tokens == prompt_tokens
    for call in running:
        call.cancel()


def _read_one_delta_and_die(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        from protos import engine_pb2_grpc as pb_grpc

        call = pb_grpc.EngineStub(channel).Generate(request(n=2, max_tokens=ENDLESS))
        for event in call:
            if event.HasField("delta"):
                os._exit(0)


async def test_a_client_that_dies_is_noticed(engine: Engine, engine_client: Client) -> None:
    process = multiprocessing.get_context("spawn").Process(
        target=_read_one_delta_and_die, args=(engine.grpc,)
    )
    process.start()
    await asyncio.to_thread(process.join, 20)
    assert process.exitcode == 0
    process.close()
    await engine_client.wait_idle(20)


async def test_abort_ends_samples_with_their_finish(engine_client: Client) -> None:
    call = await begin(engine_client, request(request_id="abort", n=3, max_tokens=ENDLESS))
    for request_id, indices in (("abort", [1, 77]), ("nobody", []), ("abort", [1])):
        message = pb.AbortRequest(request_id=request_id, indices=indices)
        await engine_client.engine.Abort(message)
    ends: dict[int, pb.Finished] = {}
    while 1 not in ends:
        event = await call.read()
        assert isinstance(event, pb.GenerateEvent)
        if event.HasField("finished"):
            ends[event.index] = event.finished
    assert list(ends) == [1]
    assert ends[1].reason == pb.FINISH_REASON_ABORT
    assert ends[1].usage.completion_tokens > 0
    await engine_client.engine.Abort(pb.AbortRequest(request_id="abort"))
    while (event := await next_event(call)) is not None:
        if event.HasField("finished"):
            ends[event.index] = event.finished
    assert sorted(ends) == [0, 1, 2]
    assert await call.code() is grpc.StatusCode.OK


async def test_a_deadline_that_passes_in_the_queue_costs_no_prefill(
    engine_client: Client,
) -> None:
    running = [
        await begin(engine_client, request(prompt=[i, 9], max_tokens=ENDLESS)) for i in range(8)
    ]
    prompt_tokens = (await engine_client.load()).prompt_tokens
    began = time.monotonic()
    answer = await engine_client.generate(request(max_tokens=5), timeout=3)
    assert 2.9 < time.monotonic() - began < 20
    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.kinds() == ["accepted"]
    load = await engine_client.wait_load(lambda load: load.num_waiting == 0, seconds=20)
    for call in running:
        call.cancel()
    assert load.prompt_tokens == prompt_tokens


async def test_a_deadline_that_passes_while_it_runs_frees_it(engine_client: Client) -> None:
    answer = await engine_client.generate(request(max_tokens=ENDLESS), timeout=3)
    assert answer.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert answer.tokens()
    await engine_client.wait_idle(20)


async def test_a_full_queue_refuses_at_once_and_recovers(engine_client: Client) -> None:
    for _ in range(3):
        running = [
            await begin(engine_client, request(prompt=[i, 3], max_tokens=ENDLESS)) for i in range(8)
        ]
        asked = [
            asyncio.create_task(
                engine_client.generate(
                    request(prompt=[i, 4], max_tokens=3, n=1 + 3 * (i % 2)), timeout=60
                )
            )
            for i in range(20)
        ]
        await all_are_refused_or_wait(engine_client, asked, len(running))
        for call in running:
            call.cancel()
        answers = await asyncio.gather(*asked)
        refused = [a for a in answers if a.code is not grpc.StatusCode.OK]
        served = [a for a in answers if a.code is grpc.StatusCode.OK]
        assert sum(len({event.index for event in answer.events}) for answer in served) <= 32
        assert refused
        for answer in refused:
            assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert answer.reason == "QUEUE_FULL"
            assert answer.retry_after_seconds is not None
            assert 0 < answer.retry_after_seconds <= 60
            assert answer.events == []
        await engine_client.wait_idle(20)


async def all_are_refused_or_wait(
    engine_client: Client, asked: list[asyncio.Task[Answer]], num_running: int
) -> None:
    await engine_client.wait_load(
        lambda load: load.num_requests - num_running + sum(t.done() for t in asked) == len(asked),
        seconds=30,
    )


async def drain(call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]) -> None:
    while await next_event(call) is not None:
        pass


async def test_a_reader_that_stands_still_is_ended(model_dir: Path) -> None:
    config = service_config(model_dir, slow_reader_timeout_seconds=3)
    # Room for more tokens than an engine makes until the reader's time is up.
    cache = CacheConfig(num_blocks=2_048)
    config = replace(config, core=replace(config.core, cache=cache))
    # As small a window as gRPC allows, so that few tokens fill it.
    async with (
        EngineService(config) as service,
        client(service.grpc_address, **{"http2.bdp_probe": 0, "http2.lookahead_bytes": 1}) as slow,
        client(service.grpc_address) as other,
    ):
        message = request(request_id="slow", max_tokens=8_000, n=4)
        message.response.logprobs = 20
        call = await begin(slow, message)
        began = time.monotonic()
        while (await other.load()).num_requests:
            assert time.monotonic() - began < 60
            neighbour = await other.generate(request(max_tokens=4))
            assert len(neighbour.tokens()) == 4
            await asyncio.sleep(0.1)
        await other.wait_idle(20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await drain(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no progress" in (caught.value.details() or "")
