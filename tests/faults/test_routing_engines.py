"""CASES.md O1 with two real engines and one facade: killed, frozen; and what affinity is worth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from clients import EngineClient
from http_facade.engine_address import parse_engine
from http_facade.flags import FacadeConfig
from http_facade.server import RunningFacade, running_facade
from tests.conftest import MakeTinyModel
from tests.facade_harness import COMPLETIONS, check_envelope
from tests.running_engine import Engine, engine_process
from tests.serving import Stream, post, stream

pytestmark = pytest.mark.slow


@contextlib.contextmanager
def two_engines(model_dir: Path, work_dir: Path, *flags: str) -> Iterator[list[Engine]]:
    """They start at the same time."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(2) as threads:
        starting = []
        for name in ("first", "second"):
            (work_dir / name).mkdir()
            manager = engine_process(model_dir, work_dir / name, *flags)
            starting.append(threads.submit(stack.enter_context, manager))
        yield [started.result() for started in starting]


@asynccontextmanager
async def in_thread(engine: contextlib.AbstractContextManager[Engine]) -> AsyncIterator[None]:
    """Starts and ends it while the facade of this process goes on."""
    await asyncio.to_thread(engine.__enter__)
    try:
        yield
    finally:
        await asyncio.to_thread(engine.__exit__, None, None, None)


class Facade:
    def __init__(self, running: RunningFacade, engines: Sequence[Engine]) -> None:
        self.running = running
        self.engines = engines

    async def whole(self, **fields: Any) -> tuple[int, dict[str, Any]]:
        status, body, _ = await post(self.running.url, COMPLETIONS, self._body(fields))
        return status, body

    async def stream(self, **fields: Any) -> Stream:
        return await stream(self.running.url, COMPLETIONS, self._body(fields))

    def _body(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.engines[0].model, "ignore_eos": True, **fields}

    def accepted(self) -> list[int]:
        """Calls that each engine accepted."""
        lines = self.running.facade.metrics.exposition().decode().splitlines()
        values = dict(line.rpartition(" ")[::2] for line in lines if not line.startswith("#"))
        name = "firsttoken_engine_requests_total"
        return [int(float(values.get(f'{name}{{engine="{e.grpc}"}}', 0))) for e in self.engines]

    def readiness(self) -> list[bool]:
        return [engine.is_ready for engine in self.running.facade.engines.engines]

    async def wait_readiness(self, *expected: bool, seconds: float) -> float:
        """How long it took."""
        began = time.monotonic()
        while self.readiness() != list(expected):
            assert time.monotonic() - began < seconds, self.readiness()
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    async def home_of(self, prompt: Sequence[int]) -> int:
        """Which engine a prompt goes to."""
        before = self.accepted()
        status, _ = await self.whole(prompt=prompt, max_tokens=1)
        assert status == 200
        return next(i for i, count in enumerate(self.accepted()) if count > before[i])


@asynccontextmanager
async def facade(engines: Sequence[Engine], **config: Any) -> AsyncIterator[Facade]:
    addresses = tuple(parse_engine(engine.grpc) for engine in engines)
    async with running_facade(FacadeConfig(engines=addresses, port=0, **config)) as running:
        served = Facade(running, engines)
        await served.wait_readiness(True, True, seconds=30)
        yield served


def prompt_of(number: int, num_tokens: int = 80) -> list[int]:
    return random.Random(number).sample(range(100, 40_000), num_tokens)


# ---------------------------------------------------------------- killed


async def test_o1_one_of_two_engines_killed_under_load(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    """What had not started is served by the other; what had ends with a typed error, at once."""
    with two_engines(tiny_model_dir("llama"), tmp_path, "--max-num-seqs=4") as engines:
        async with facade(engines) as served:
            victim = engines[await served.home_of(prompt_of(0))]
            accepted_before = sum(served.accepted())
            killed_at, ended = 0.0, []

            async def ask(number: int) -> tuple[int, bool]:
                """Whether it was answered in full."""
                fields = {"prompt": prompt_of(number % 7), "max_tokens": 100}
                if number % 3 == 0:
                    status, body = await served.whole(**fields)
                    if status == 200:
                        return number, body["usage"]["completion_tokens"] == 100
                    error = check_envelope(status, body, 503)
                else:
                    answer = await served.stream(**fields)
                    if answer.finish_reasons() == ["length"] and answer.num_done == 1:
                        return number, True
                    assert answer.finish_reasons() == []
                    last = answer.events[-1] if answer.events else json.loads(answer.after_done)
                    error = last["error"]
                assert error["code"] == "engine_unavailable", error
                ended.append(time.monotonic() - killed_at)
                return number, False

            asked = []
            for number in range(90):
                asked.append(asyncio.create_task(ask(number)))
                await asyncio.sleep(0.02)
                if number == 40:
                    killed_at = time.monotonic()
                    victim.process.send_signal(signal.SIGKILL)
            answers = await asyncio.gather(*asked)
            errors = [number for number, is_whole in answers if not is_whole]
            # each was accepted exactly once: so those that failed had been, too
            assert sum(served.accepted()) - accepted_before == 90
            assert errors and max(errors) <= 40
            assert max(ended) < 5
            assert sum(served.readiness()) == 1
            status, _ = await served.whole(prompt=prompt_of(0), max_tokens=3)
            assert status == 200

            # another one in its place is found by itself, and the keys come home
            (tmp_path / "again").mkdir()
            place = f"--grpc-port={victim.grpc.rpartition(':')[2]}"
            model_dir = tiny_model_dir("llama")
            async with in_thread(engine_process(model_dir, tmp_path / "again", place)):
                await served.wait_readiness(True, True, seconds=40)
                assert engines[await served.home_of(prompt_of(0))] is victim


# ---------------------------------------------------------------- frozen


async def test_o1_a_frozen_engine_is_left_within_5_s_and_rejoined(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    with two_engines(tiny_model_dir("llama"), tmp_path) as engines:
        async with facade(engines) as served:
            home = await served.home_of(prompt_of(0))
            frozen = engines[home].process
            begun = asyncio.create_task(served.stream(prompt=prompt_of(0), max_tokens=1500))
            accepted = served.accepted()
            while served.accepted() == accepted:  # noqa: ASYNC110 - a count tells nobody
                await asyncio.sleep(0.01)
            frozen.send_signal(signal.SIGSTOP)
            try:
                asked_at = time.monotonic()
                waiting = [
                    asyncio.create_task(served.whole(prompt=prompt_of(0), max_tokens=5))
                    for _ in range(3)
                ]
                expected = [index != home for index in range(2)]
                await served.wait_readiness(*expected, seconds=6)
                assert time.monotonic() - asked_at < 6
                for status, body in await asyncio.gather(*waiting):  # nothing of them is lost
                    assert status == 200 and body["usage"]["completion_tokens"] == 5
                assert time.monotonic() - asked_at < 8
                began = time.monotonic()
                assert (await served.whole(prompt=prompt_of(0), max_tokens=5))[0] == 200
                assert time.monotonic() - began < 2
                assert not begun.done()
            finally:
                frozen.send_signal(signal.SIGCONT)
            await served.wait_readiness(True, True, seconds=30)
            answer = await begun  # what had started goes on where it was
            assert answer.finish_reasons() == ["length"]
            assert await served.home_of(prompt_of(0)) == home
            status, body = await served.whole(prompt=prompt_of(0), max_tokens=0)
            check_envelope(status, body, 400, "max_tokens")


# ---------------------------------------------------------------- what affinity is worth

NUM_PREFIXES = 30
PREFIX_TOKENS = 128  # 8 blocks
NUM_USES = 3
NUM_BLOCKS = 19 * 8 + 4  # of each engine: more than half of the prefixes, as shares differ


async def hit_rate(engines: Sequence[Engine], policy: str, first_prefix: int) -> float:
    """Of a workload of many system prompts, each with a few different questions."""
    asked = [
        (first_prefix + prefix, question)
        for question in range(NUM_USES)
        for prefix in random.Random(question).sample(range(NUM_PREFIXES), NUM_PREFIXES)
    ]
    before = await prefix_tokens(engines)
    async with facade(engines, routing_policy=policy) as served:
        for prefix, question in asked:
            prompt = [*prompt_of(prefix, PREFIX_TOKENS), *prompt_of(question, 10)]
            status, _ = await served.whole(prompt=prompt, max_tokens=1)
            assert status == 200
        assert sum(served.accepted()) == len(asked)
    looked_up, found = (
        now - then for now, then in zip(await prefix_tokens(engines), before, strict=True)
    )
    return found / looked_up


async def prefix_tokens(engines: Sequence[Engine]) -> tuple[int, int]:
    """Looked up and found in the engines' caches, so far."""
    looked_up = found = 0
    for engine in engines:
        async with EngineClient(engine.grpc) as client:
            load = await client.get_load()
        looked_up += load.prefix_cache_queries
        found += load.prefix_cache_hits
    return looked_up, found


async def test_affinity_at_least_doubles_the_prefix_hits_of_round_robin(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    flags = (f"--num-gpu-blocks-override={NUM_BLOCKS}", "--max-model-len=512")
    with two_engines(tiny_model_dir("llama"), tmp_path, *flags) as engines:
        affine = await hit_rate(engines, "prefix", first_prefix=0)
        in_turn = await hit_rate(engines, "round-robin", first_prefix=1000)
        print(f"prefix hits: {affine:.0%} with affinity, {in_turn:.0%} round robin")
        assert affine >= 2 * in_turn
        assert affine > 0.4  # of at most 2 uses in 3
