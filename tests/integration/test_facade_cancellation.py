"""CASES C1, C4: a client that is gone ends its generation, stream or not; nothing accumulates."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from clients.testing import Accept, Emit, Hang, Progress, Script
from tests.facade_harness import CHAT, COMPLETIONS, Harness, chat, completion, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.fake.script(Script((Accept(), Progress(), Emit([504]), Hang())))
    return shared


async def metric(facade: Harness, name: str, *labels: str) -> float:
    _, raw, _ = await facade.get("/metrics")
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in raw.decode().splitlines()
        if line.startswith(name) and all(label in line for label in labels)
    )


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_c1_a_client_that_is_gone_stops_its_generation(
    facade: Harness, stream: bool, how: str
) -> None:
    """A client that only half-closes counts as gone, too: aiohttp closes such a connection."""
    before = await metric(facade, "http_server_answers_total", CHAT, '"499"')
    reader, writer = await facade.send_raw(CHAT, chat(stream=stream))
    (call,) = await facade.fake.wait_for_calls(1)
    if stream:
        await reader.readuntil(b'"content":')
    match how:
        case "close":
            writer.close()
        case "reset":
            writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
            )
            writer.close()
        case _:
            writer.write_eof()
    assert (await call.wait_closed()).value == "cancelled"
    if how == "half-close":
        await reader.read()  # the facade closes its side as well
        writer.close()
    await no_request_is_active(facade)
    assert await metric(facade, "http_server_answers_total", CHAT, '"499"') == before + 1


async def no_request_is_active(facade: Harness) -> None:
    deadline = time.monotonic() + 10
    while await metric(facade, "http_server_active_requests", CHAT):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_c1_a_client_that_leaves_before_the_engine_answers(facade: Harness) -> None:
    facade.fake.script(Script((Hang(),)))
    _, writer = await facade.send_raw(CHAT, chat(stream=True))
    (call,) = await facade.fake.wait_for_calls(1)
    writer.close()
    assert (await call.wait_closed()).value == "cancelled"


async def test_c4_all_samples_and_all_prompts_end_with_their_client(facade: Harness) -> None:
    reader, writer = await facade.send_raw(CHAT, chat(n=4, stream=True))
    await facade.fake.wait_for_calls(1)
    await reader.readuntil(b'"content":')
    writer.close()
    reader, writer = await facade.send_raw(COMPLETIONS, completion(prompt=["a", "b", "c"], n=2))
    calls = await facade.fake.wait_for_calls(4)
    writer.close()
    for call in calls:
        assert (await call.wait_closed()).value == "cancelled"


async def test_c4_with_one_sample_already_ended_by_a_stop_string(facade: Harness) -> None:
    ids = facade.tok.encode("ab STOP")
    emits = [Emit([token_id]) for token_id in ids]
    facade.fake.script(Script((Accept(), Progress(), *emits, Hang())))
    reader, writer = await facade.send_raw(CHAT, chat(n=4, stream=True, stop="STOP"))
    await reader.readuntil(b'"finish_reason":"stop"')
    (call,) = facade.fake.calls
    assert call.outcome.value == "open"
    writer.close()
    assert (await call.wait_closed()).value == "cancelled"


async def test_two_hundred_closes_leave_no_task_behind(facade: Harness) -> None:
    async def come_and_go(number: int) -> None:
        reader, writer = await facade.send_raw(
            CHAT, chat(stream=bool(number % 2), n=1 + number % 3)
        )
        if number % 2:
            await reader.readuntil(b'"content":')
        else:
            await asyncio.sleep(0.005 * (number % 5))
        writer.close()

    async def round_of_closes() -> int:
        for start in range(0, 100, 25):
            await asyncio.gather(*map(come_and_go, range(start, start + 25)))
        deadline = time.monotonic() + 20
        while facade.fake.num_open_calls or facade.running.facade.runs._runs:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.1)
        gc.collect()
        return len(asyncio.all_tasks())

    first = await round_of_closes()
    last = await round_of_closes()
    deadline = time.monotonic() + 20
    while last > first + 3:
        assert time.monotonic() < deadline, last
        await asyncio.sleep(0.1)
        last = len(asyncio.all_tasks())
    await no_request_is_active(facade)


async def test_a_client_that_does_not_read_slows_only_its_own_stream(facade: Harness) -> None:
    """Back-pressure reaches the engine's call: the facade holds a bounded part of the answer."""
    chunk, num_chunks = [504] * 200, 2_000  # with 20 alternatives a token: 80 MB of messages
    facade.fake.script(Script((Accept(), Progress(), *(Emit(chunk) for _ in range(num_chunks)))))
    body = chat(stream=True, logprobs=True, top_logprobs=20)
    _, writer = await facade.send_raw(CHAT, body)  # and reads nothing but a first buffer
    try:
        (call,) = await facade.fake.wait_for_calls(1)
        emitted, num_still = 0, 0
        deadline = time.monotonic() + 60
        while num_still < 3:
            assert time.monotonic() < deadline, "the engine never had to wait"
            await asyncio.sleep(0.2)
            before, emitted = emitted, call._num_emitted[0]
            num_still = num_still + 1 if emitted == before > 0 else 0
        assert 0 < emitted < num_chunks * len(chunk)

        facade.fake.script(Script.of_tokens(facade.tok.encode("still here")))
        answer = await facade.stream(CHAT, chat())
        assert answer.text() == "still here"
    finally:
        writer.transport.abort()
    assert (await call.wait_closed()).value == "cancelled"
