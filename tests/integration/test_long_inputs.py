"""A megabyte of input leaves the event loop free: it delays others' tokens by at most 50 ms."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clients.testing import FakeEngine, Script
from tests.facade_harness import CHAT, COMPLETIONS, MODEL, chat
from tests.serving import stream

pytestmark = pytest.mark.slow

MAX_DELAY_SECONDS = 0.05
TOKEN_SECONDS = 0.02  # from one of the neighbour's tokens to the next
ATTEMPTS = 4  # on a machine that does other things, too
TEXT = "The quick brown fox, jumps over 13 lazy dogs; naïvely. " * 19_000  # 1 MB


def tool(number: int, description: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "description": description}}


INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tokenize": ("/tokenize", {"prompt": TEXT, "return_token_strs": True}),
    "tokenize chat": ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    "detokenize": ("/detokenize", {"tokens": list(range(1_000, 41_000)) * 6}),
    "render": (f"{CHAT}/render", chat(messages=[{"role": "user", "content": TEXT}])),
    "chat": (CHAT, chat(messages=[{"role": "user", "content": TEXT}], max_tokens=1)),
    "completion": (COMPLETIONS, {"model": MODEL, "prompt": TEXT, "max_tokens": 1, "echo": True}),
    "many messages": (
        CHAT,
        chat(messages=[{"role": "user", "content": TEXT[:100]}] * 10_000, max_tokens=1),
    ),
    "long tools": (CHAT, chat(tools=[tool(i, TEXT[:8_000]) for i in range(128)], max_tokens=1)),
}


@asynccontextmanager
async def facade_process(target: str) -> AsyncIterator[str]:
    """A facade of its own, so that only it is measured; its URL."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "http_facade", "--engine", target, "--port", "0",
        "--log-level", "error",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url: str = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))["http"]
        async with aiohttp.ClientSession() as session:
            for _ in range(500):
                async with session.get(url + "/readyz") as answer:
                    if answer.status == 200:
                        break
                await asyncio.sleep(0.02)
        yield url
    finally:
        process.terminate()
        await process.communicate()


async def longest_gap(url: str, path: str, body: bytes) -> float:
    """Seconds between two tokens of a stream that `body` is sent in the middle of."""
    neighbour = asyncio.create_task(stream(url, CHAT, chat()))
    await asyncio.sleep(0.2)
    async with (
        aiohttp.ClientSession(headers={"content-type": "application/json"}) as session,
        session.post(url + path, data=io.BytesIO(body)) as answer,
    ):
        said = await answer.read()
        assert answer.status == 200, said[:500]
    times = (await neighbour).delta_times()
    return max(after - before for before, after in itertools.pairwise(times))


@pytest.mark.parametrize("name", INPUTS)
async def test_a_megabyte_delays_no_neighbour(embedded_model_dir: Path, name: str) -> None:
    path, fields = INPUTS[name]
    body = json.dumps(fields).encode()
    async with FakeEngine(embedded_model_dir, model=MODEL) as fake:
        fake.model_info = dataclasses.replace(
            fake.model_info, max_model_len=2_000_000, max_queued_tokens=10_000_000
        )
        fake.script(Script.of_tokens(list(range(1_000, 1_150)), delay_seconds=TOKEN_SECONDS))
        async with facade_process(fake.target) as url:
            delays = []
            for _ in range(ATTEMPTS):
                delays.append(await longest_gap(url, path, body) - TOKEN_SECONDS)
                if delays[-1] <= MAX_DELAY_SECONDS:
                    return
    pytest.fail(f"tokens were late by {[f'{delay * 1000:.0f} ms' for delay in delays]}")
