"""Mailbox and frames between actor and core."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AbortRequest,
    AddRequest,
    Command,
    CoreStats,
    Failure,
    Finish,
    FinishReason,
    Frame,
    Ready,
    RequestOutput,
    RequestTiming,
    SamplingParams,
    Shutdown,
    StepFrame,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.transport import (
    CoreChannel,
    CoreConnection,
    SocketChannel,
    SocketConnection,
    ThreadConnection,
    decode_commands,
    encode_frame,
)


def add(request_id: str, num_tokens: int = 3) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(range(num_tokens)),
        sampling=SamplingParams(logit_bias={7: -1.5}, seed=2**64 - 1, num_logprobs=0),
        stopping=StoppingCriteria(max_tokens=4, stop_token_ids=(1, 2), eos_token_ids=(0,)),
        structured_output=StructuredOutput("json_schema", "{}"),
        n=2,
    )


def frame(step_id: int, num_outputs: int = 1) -> StepFrame:
    outputs = [RequestOutput(f"r{i}", 0, [1, 2]) for i in range(num_outputs)]
    return StepFrame(step_id, 1, 2, 3, outputs, CoreStats(num_running=1))


# ---------------------------------------------------------------- mailbox


def test_commands_keep_their_order() -> None:
    mailbox = Mailbox()
    commands: list[Command] = [add("a"), AbortRequest("a"), add("b")]
    mailbox.put(commands[:2])
    mailbox.put(commands[2:])
    assert mailbox.drain() == commands
    assert mailbox.drain() == []


def test_aborts_overtake_but_never_their_own_request() -> None:
    mailbox = Mailbox()
    mailbox.put([add("new"), AbortRequest("new"), AbortRequest("old"), AbortRequest("old", (1,))])
    assert mailbox.take_aborts() == [AbortRequest("old"), AbortRequest("old", (1,))]
    assert mailbox.drain() == [add("new"), AbortRequest("new")]
    assert mailbox.take_aborts() == []


def test_waiting_ends_by_a_command_a_wake_up_or_the_end() -> None:
    for act in (
        lambda mailbox: mailbox.put([Shutdown()]),
        lambda mailbox: mailbox.wake(),
        lambda mailbox: mailbox.close(),
    ):
        mailbox = Mailbox()
        began = time.monotonic()
        threading.Timer(0.05, act, [mailbox]).start()
        assert mailbox.wait(60)
        assert time.monotonic() - began < 30
    assert mailbox.closed


def test_waiting_times_out_and_a_wake_up_counts_once() -> None:
    mailbox = Mailbox()
    assert not mailbox.wait(0.01)
    mailbox.wake()
    assert mailbox.wait(0.01)
    assert not mailbox.wait(0.01)


# ---------------------------------------------------------------- both transports


async def socket_pair() -> tuple[SocketChannel, SocketConnection]:
    ours, theirs = socket.socketpair()
    return SocketChannel(theirs), await SocketConnection.open(ours)


async def exchange(channel: CoreChannel, connection: CoreConnection) -> None:
    commands: list[Command] = [add("a", 200_000), AbortRequest("a", (0, 1)), Shutdown()]
    connection.send(commands[:1])
    connection.send(commands[1:])
    received: list[Command] = []
    while len(received) < 3:
        assert await asyncio.to_thread(channel.mailbox.wait, 20)
        received += channel.mailbox.drain()
    assert received == commands

    ready = Ready(
        1,
        "Llama",
        10,
        20,
        (2,),
        30,
        8,
        64,
        "cpu",
        "float32",
        "int4",
        "float16",
        True,
        {"x": "y"},
        "d",
    )
    frames: list[Frame] = [ready, frame(1), frame(2, num_outputs=20_000), frame(3)]
    for item in frames:
        channel.send(item)
    assert [await connection.receive() for _ in frames] == frames


async def test_socket_transport_carries_everything_in_order() -> None:
    channel, connection = await socket_pair()
    await exchange(channel, connection)
    await connection.close()
    await asyncio.to_thread(channel.close)


async def test_thread_transport_carries_everything_in_order() -> None:
    connection = ThreadConnection()
    await exchange(connection.channel, connection)
    connection.channel.close()
    assert await connection.receive() is None
    await connection.close()
    assert connection.channel.mailbox.closed


async def test_a_frozen_actor_never_blocks_the_core() -> None:
    channel, connection = await socket_pair()
    large = frame(1, num_outputs=5_000)
    for _ in range(50):  # some MB that nobody reads, here for as long as it takes
        channel.send(large)
    channel.send(frame(2))
    received = [await connection.receive() for _ in range(51)]
    assert received == [large] * 50 + [frame(2)]
    await connection.close()
    await asyncio.to_thread(channel.close)


async def test_the_actor_hanging_up_closes_the_mailbox() -> None:
    channel, connection = await socket_pair()
    await connection.close()
    assert await asyncio.to_thread(channel.mailbox.wait, 20)
    assert channel.mailbox.closed
    channel.send(frame(1))  # nobody reads it; nothing raises
    await asyncio.to_thread(channel.close)


async def test_the_core_hanging_up_is_the_end_of_frames_even_inside_one() -> None:
    ours, theirs = socket.socketpair()
    connection = await SocketConnection.open(ours)
    theirs.sendall(b"\xff\x00\x00\x00half")
    theirs.close()
    assert await connection.receive() is None
    connection.send([Shutdown()])
    await connection.close()


def test_commands_survive_the_wire_exactly() -> None:
    commands: list[Command] = [add("a"), AbortRequest("b", (3,)), Shutdown()]
    assert decode_commands(encode_frame(commands)) == commands


async def test_a_frame_that_cannot_be_written_ends_the_core_at_once() -> None:
    channel, connection = await socket_pair()
    broken = Failure("INVALID_VALUE", "half of a pair: \ud800")
    finish = Finish(FinishReason.ERROR, RequestTiming(1), failure=broken)
    channel.send(StepFrame(1, 1, 2, 3, [RequestOutput("r", 0, finish=finish)], CoreStats()))
    async with asyncio.timeout(20):
        assert await connection.receive() is None
        assert await asyncio.to_thread(channel.mailbox.wait, 20)
    assert channel.mailbox.closed
    await connection.close()
    await asyncio.to_thread(channel.close)


async def test_commands_that_cannot_be_read_end_the_core_at_once() -> None:
    ours, theirs = socket.socketpair()
    channel, connection = SocketChannel(theirs), await SocketConnection.open(ours)
    ours.send(b"\x01\x00\x00\x00\xc1")  # no msgpack
    async with asyncio.timeout(20):
        assert await connection.receive() is None
    assert channel.mailbox.closed
    await connection.close()
    await asyncio.to_thread(channel.close)
