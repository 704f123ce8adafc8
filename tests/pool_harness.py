"""A real facade in front of several scripted engines."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import TracerProvider

from clients.testing import FakeEngine, Script
from clients.text.tokenizer import Tokenizer
from http_facade.engine_address import EngineAddress, parse_engine
from http_facade.flags import FacadeConfig
from http_facade.server import running_facade
from tests.facade_harness import COMPLETIONS, MODEL, Harness, completion


@dataclass
class Pool:
    facade: Harness
    fakes: Sequence[FakeEngine]

    def say(self, text: str) -> None:
        """All engines answer so from now on."""
        token_ids = self.facade.tok.encode(text, add_special_tokens=False)
        for fake in self.fakes:
            fake.script(Script.of_tokens(token_ids, stop_token_id=2))

    def num_calls(self) -> list[int]:
        return [len(fake.calls) for fake in self.fakes]

    def readiness(self) -> list[bool]:
        return [engine.is_ready for engine in self.facade.running.facade.engines.engines]

    async def wait_readiness(self, *expected: bool, seconds: float = 30.0) -> float:
        """Returns how long it took."""
        began = time.monotonic()
        while self.readiness() != list(expected):
            assert time.monotonic() - began < seconds, self.readiness()
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def metric(self, line: str) -> float:
        """The value of a line of /metrics; 0 if it isn't there."""
        _, text, _ = await self.facade.get("/metrics")
        values = [x.split()[-1] for x in text.decode().splitlines() if x.startswith(line + " ")]
        return float(values[0]) if values else 0.0


@asynccontextmanager
async def facade_and_fakes(
    model_dir: Path,
    *models: str,
    addresses: Callable[[Sequence[FakeEngine]], Sequence[EngineAddress]] | None = None,
    wait: bool = True,
    tracer_provider: TracerProvider | None = None,
    **config: Any,
) -> AsyncIterator[Pool]:
    """One engine per model's name; none given: two replicas. All are up at the start."""
    async with contextlib.AsyncExitStack() as stack:
        fakes = [FakeEngine(model_dir, model=name) for name in models or (MODEL, MODEL)]
        for fake in fakes:
            await stack.enter_async_context(fake)
        engines = addresses(fakes) if addresses else [parse_engine(fake.target) for fake in fakes]
        settings = FacadeConfig(engines=tuple(engines), port=0, **config)
        running = await stack.enter_async_context(
            running_facade(settings, tracer_provider=tracer_provider)
        )
        tok = Tokenizer.from_files(fakes[0].tokenizer.files)
        pool = Pool(Harness(fakes[0], running, tok), fakes)
        if wait:
            await pool.wait_readiness(*[True] * len(engines))
        yield pool


# ---------------------------------------------------------------- requests


# So many that some go to each of two engines: which one is a toss, as their ports are the system's.
NUM_PROMPTS = 24


def prompt(number: int) -> list[int]:
    """Token ids that fill a few blocks, different from the first block on."""
    return [100 + number] * 80


async def ask(pool: Pool, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, body, _ = await pool.facade.post(COMPLETIONS, completion(**fields))
    return status, body


async def home_of(pool: Pool, **fields: Any) -> tuple[FakeEngine, FakeEngine]:
    """The engine that a request goes to, and the other one."""
    pool.say("found")
    before = pool.num_calls()
    assert (await ask(pool, **fields))[0] == 200
    now = pool.num_calls()
    index = next(i for i in range(2) if now[i] > before[i])
    for fake in pool.fakes:
        fake.calls.clear()
    return pool.fakes[index], pool.fakes[1 - index]
