"""Several facade processes on one port: real ones, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from clients.testing import Accept, Emit, FakeEngine, Finish, Hang, Pause, Progress, Script
from tests.conftest import MakeTinyModel
from tests.facade_harness import COMPLETIONS, MODEL, completion
from tests.serving import post, probe, serve

NUM_WORKERS = 2


@dataclass
class Running:
    url: str
    process: asyncio.subprocess.Process
    fake: FakeEngine
    log: Path

    def workers(self) -> list[int]:
        pid = self.process.pid
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]

    async def metrics(self) -> dict[str, float]:
        async with aiohttp.ClientSession() as session, session.get(self.url + "/metrics") as answer:
            text = await answer.text()
        return {
            sample.name + json.dumps(sample.labels, sort_keys=True): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    async def answers(self) -> float:
        """Of completions, with status 200."""
        labels = json.dumps({"http_response_status_code": "200", "http_route": COMPLETIONS})
        return (await self.metrics()).get(f"http_server_answers_total{labels}", 0.0)


@contextlib.asynccontextmanager
async def running(model_dir: Path, work_dir: Path, *flags: str) -> AsyncIterator[Running]:
    log = work_dir / "facade.log"
    async with FakeEngine(model_dir, model=MODEL) as fake:
        command = [sys.executable, "-m", "http_facade", f"--engine={fake.target}", "--port=0"]
        command += [f"--workers={NUM_WORKERS}", "--trace-dir=none", "--shutdown-timeout=5", *flags]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=asyncio.subprocess.PIPE, stderr=output
            )
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            assert line, log.read_text()
            one = Running(json.loads(line)["http"], process, fake, log)
            await until(lambda: is_ready(one.url))
            yield one
        except BaseException:
            print(log.read_text())  # pytest shows it
            raise
        finally:
            if process.returncode is None:
                process.terminate()
                await asyncio.wait_for(process.wait(), 40)


def runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # ended, and nobody has asked how


async def is_ready(url: str) -> bool:
    """Whichever worker is asked."""
    statuses = [await asyncio.to_thread(probe, url + "/readyz") for _ in range(8)]
    return set(statuses) == {200}


async def until(holds: Callable[[], Awaitable[bool]], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, f"not so in {seconds} s"
        await asyncio.sleep(0.05)


async def test_a_worker_that_is_killed_is_replaced_and_the_totals_never_go_back(
    embedded_model_dir: Path, tmp_path: Path
) -> None:
    async with running(embedded_model_dir, tmp_path) as facade:
        facade.fake.script(
            Script((Accept(), Progress(), Emit((504,)), Pause(0.02), Emit((504,)), Finish()))
        )
        num_answered = num_lost = 0
        stopped = asyncio.Event()

        async def keep_asking() -> None:
            nonlocal num_answered, num_lost
            while not stopped.is_set():
                try:  # each on a connection of its own
                    status, _, _ = await post(facade.url, COMPLETIONS, completion(max_tokens=2))
                except aiohttp.ClientError:
                    num_lost += 1
                else:
                    num_answered += status == 200

        async def asked(more: int) -> None:
            goal = num_answered + more

            async def reached() -> bool:
                return num_answered >= goal

            await until(reached)

        assert len(facade.workers()) == NUM_WORKERS
        asking = [asyncio.create_task(keep_asking()) for _ in range(6)]
        await asked(20)
        total = await facade.answers()
        assert total > 0
        killed = facade.workers()[0]
        os.kill(killed, signal.SIGKILL)
        seen = [total]
        for _ in range(20):  # whoever answers, while the place is empty and after
            with contextlib.suppress(aiohttp.ClientError):
                seen.append(await facade.answers())
            await asyncio.sleep(0.05)
        assert seen == sorted(seen)

        async def is_replaced() -> bool:
            now = facade.workers()
            return len(now) == NUM_WORKERS and killed not in now and await is_ready(facade.url)

        await until(is_replaced)
        await asked(20)
        stopped.set()
        await asyncio.gather(*asking)
        # what the killed one had accepted, and what its socket took while it was torn down
        assert num_lost <= 2 * len(asking)
        assert num_answered <= await facade.answers() <= num_answered + num_lost
        metrics = await facade.metrics()
        active = json.dumps({"http_route": COMPLETIONS})
        assert metrics[f"http_server_active_requests{active}"] == 0
        assert "exit code 137" in facade.log.read_text()


async def test_sigterm_lets_every_workers_streams_end_and_exits_with_0(
    embedded_model_dir: Path, tmp_path: Path
) -> None:
    async with running(embedded_model_dir, tmp_path) as facade:
        facade.fake.script(
            Script((Accept(), Progress(), Emit((504,)), Pause(1.0), Emit((504,)), Finish()))
        )
        streams = [
            asyncio.create_task(post(facade.url, COMPLETIONS, completion(max_tokens=2)))
            for _ in range(8)
        ]

        async def all_run() -> bool:
            return len(facade.fake.calls) == len(streams)

        await until(all_run)
        facade.process.terminate()
        answers = await asyncio.gather(*streams)
        assert [status for status, _, _ in answers] == [200] * len(streams)
        assert await asyncio.wait_for(facade.process.wait(), 40) == 0
        assert await asyncio.to_thread(probe, facade.url + "/healthz") == 0


async def test_a_second_sigterm_does_not_wait(embedded_model_dir: Path, tmp_path: Path) -> None:
    async with running(embedded_model_dir, tmp_path, "--shutdown-timeout=90") as facade:
        facade.fake.script(Script((Accept(), Progress(), Emit((504,)), Hang())))
        asked = asyncio.create_task(post(facade.url, COMPLETIONS, completion()))

        async def is_asked() -> bool:
            return len(facade.fake.calls) == 1

        await until(is_asked)
        facade.process.send_signal(signal.SIGTERM)

        async def is_draining() -> bool:
            return await asyncio.to_thread(probe, facade.url + "/readyz") == 503

        await until(is_draining)
        facade.process.send_signal(signal.SIGTERM)
        status, body, _ = await asked
        assert status == 503 and body["error"]["code"] == "engine_unavailable"
        assert await asyncio.wait_for(facade.process.wait(), 40) == 0


async def test_nobody_else_gets_the_port_and_no_worker_outlives_a_killed_parent(
    embedded_model_dir: Path, tmp_path: Path
) -> None:
    async with running(embedded_model_dir, tmp_path) as facade:
        port = facade.url.rpartition(":")[2]
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "http_facade", f"--port={port}", "--workers=2"),
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await other.communicate()
        assert other.returncode == 2
        assert f"port {port} on 127.0.0.1 is in use" in errors.decode()

        workers = facade.workers()
        facade.process.kill()
        await facade.process.wait()

        async def all_gone() -> bool:
            return not any(map(runs, workers))

        await until(all_gone)


@pytest.mark.slow
async def test_serve_hands_the_number_of_workers_on(
    tiny_model_dir: MakeTinyModel, tmp_path: Path
) -> None:
    with serve(tiny_model_dir("llama"), tmp_path, "--workers", "3") as served:
        for _ in range(12):
            status, body, _ = await post(
                served.http, COMPLETIONS, {"model": served.model, "prompt": "Hi", "max_tokens": 2}
            )
            assert status == 200, body
        async with aiohttp.ClientSession() as session, session.get(served.http + "/metrics") as got:
            text = await got.text()
        route = f'http_response_status_code="200",http_route="{COMPLETIONS}"'
        assert f"http_server_answers_total{{{route}}} 12.0" in text
        assert "3 workers listen on" in served.log.read_text()
