"""CASES C1, C4 and the close storm: a client that is gone costs nothing any more."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from tests.serving import Served, load, post, resident_bytes, wait_idle

CHAT = "/v1/chat/completions"
IN_TIME_SECONDS = 1.5  # a second, and the time to look; a busy machine may take longer at times


def endless(served: Served, **fields: Any) -> dict[str, Any]:
    return {
        "model": served.model,
        "messages": [{"role": "user", "content": "Tell me a very long story."}],
        "max_tokens": 4000,
        "ignore_eos": True,
        **fields,
    }


async def send(
    served: Served, body: dict[str, Any]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw socket with the request written: aiohttp's client would hide what happens to it."""
    host = urlsplit(served.http)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    data = json.dumps(body).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def running(served: Served, count: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while (await load(served)).num_running < count:
        assert time.monotonic() < deadline, "never started to run"
        await asyncio.sleep(0.05)


async def seconds_to_stop(served: Served, writer: asyncio.StreamWriter) -> float:
    """Closes the connection, and looks until the engine is idle."""
    began = time.monotonic()
    writer.close()
    await wait_idle(served, 20)
    return time.monotonic() - began


def aborted(served: Served) -> float:
    """The engine's counter of samples that ended by an abort."""
    with urllib.request.urlopen(served.metrics + "/metrics", timeout=10) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in lines
        if line.startswith("vllm:request_success_total{") and 'finished_reason="abort"' in line
    )


async def test_c1_a_dropped_plain_request_stops(served: Served) -> None:
    waits: list[float] = []
    for _ in range(3):
        before = aborted(served)
        _, writer = await send(served, endless(served))
        await running(served, 1)
        waits.append(await seconds_to_stop(served, writer))
        assert aborted(served) == before + 1
        report = await load(served)
        await asyncio.sleep(0.5)
        assert (await load(served)).generated_tokens == report.generated_tokens
    assert min(waits) < IN_TIME_SECONDS


async def test_c1_a_dropped_stream_stops(served: Served) -> None:
    waits: list[float] = []
    for _ in range(3):
        reader, writer = await send(served, endless(served, stream=True))
        await reader.readuntil(b'"content"')
        waits.append(await seconds_to_stop(served, writer))
    assert min(waits) < IN_TIME_SECONDS


async def test_c4_dropping_a_stream_of_four_frees_all_four(served: Served) -> None:
    waits: list[float] = []
    for round_number in range(50):
        reader, writer = await send(served, endless(served, n=4, stream=True, max_tokens=2000))
        await reader.readuntil(b'"index":3' if round_number % 2 else b'"content"')
        waits.append(await seconds_to_stop(served, writer))
    assert statistics.median(waits) < IN_TIME_SECONDS


async def test_c4_with_one_choice_already_finished(served: Served) -> None:
    """Four samples, one of which is stopped by its own text before the client goes."""
    body = endless(
        served, n=4, stream=True, max_tokens=2000, temperature=1.0, seed=7, stop=[" the"]
    )
    reader, writer = await send(served, body)
    await reader.readuntil(b'"finish_reason":"stop"')
    await seconds_to_stop(served, writer)


async def test_two_hundred_closes_leave_nothing(served: Served) -> None:
    async def close_early(number: int) -> None:
        reader, writer = await send(served, endless(served, stream=bool(number % 2)))
        if number % 2:
            await reader.readuntil(b"data: ")
        else:
            await asyncio.sleep(0.02 * (number % 7))
        writer.close()

    for start in range(0, 200, 25):
        await asyncio.gather(*(close_early(number) for number in range(start, start + 25)))
    report = await wait_idle(served, 20)
    assert report.num_requests == 0
    status, body, _ = await post(served.http, CHAT, endless(served, max_tokens=4))
    assert status == 200 and body["usage"]["completion_tokens"] == 4
    assert resident_bytes(served.pid) < 1 << 30
