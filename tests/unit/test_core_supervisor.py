"""One core alive, whatever happens to cores: the supervisor with scripted ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from engine_service.config import CoreConfig, ModelConfig, SchedulerConfig
from engine_service.core_launcher import RunningCore
from engine_service.core_supervisor import CoreStartError, CoreSupervisor
from engine_service.engine_actor import EngineActor
from engine_service.messages import CoreStats, Ready, Shutdown, StartFailed, StepFrame
from engine_service.service_metrics import ServiceMetrics
from engine_service.transport import CoreConnection, ThreadConnection

pytestmark = pytest.mark.usefixtures("virtual_clock")

READY = Ready(
    7, "Llama", 100, 50, (2,), 30, 8, 64, "cpu", "float32", "none", "float32", False, {}, "w"
)
BEAT = StepFrame(0, 1, 1, 0, [], CoreStats(num_running=0))


class ScriptedCore:
    """`life` plays it; when it returns, or the core is killed, the core is gone."""

    pid = 4321

    def __init__(self, life: Callable[[ScriptedCore], Awaitable[None]]) -> None:
        self.thread_connection = ThreadConnection()
        self.connection: CoreConnection = self.thread_connection
        self.mailbox = self.thread_connection.channel.mailbox
        self.killed = False
        self._task = asyncio.ensure_future(self._live(life))

    async def _live(self, life: Callable[[ScriptedCore], Awaitable[None]]) -> None:
        try:
            await life(self)
        finally:
            self.thread_connection.channel.close()

    def kill(self) -> None:
        self.killed = True
        self._task.cancel()

    async def wait(self) -> int:
        await asyncio.wait([self._task])
        return -9 if self.killed else 0


async def healthy(core: ScriptedCore) -> None:
    """Ready, then heartbeats until Shutdown."""
    core.thread_connection.channel.send(READY)
    while Shutdown() not in core.mailbox.drain():
        core.thread_connection.channel.send(BEAT)
        await asyncio.sleep(0.02)


async def crashing(core: ScriptedCore) -> None:
    pass


async def ready_then_gone(core: ScriptedCore) -> None:
    core.thread_connection.channel.send(READY)
    await asyncio.sleep(0.05)


async def misconfigured(core: ScriptedCore) -> None:
    core.thread_connection.channel.send(StartFailed("no such model"))


async def frozen(core: ScriptedCore) -> None:
    core.thread_connection.channel.send(READY)
    await asyncio.sleep(60)


async def loading(core: ScriptedCore) -> None:
    await asyncio.sleep(60)


class Bench:
    """A supervisor whose cores live the given lives, the last one again and again."""

    def __init__(self, *lives: Callable[[ScriptedCore], Awaitable[None]]) -> None:
        self.lives = list(lives)
        self.cores: list[ScriptedCore] = []
        self.actor = EngineActor(SchedulerConfig(), ServiceMetrics("m"), 10)
        self.known: list[Ready] = []
        config = CoreConfig(ModelConfig("nowhere", "m"))
        self.supervisor = CoreSupervisor(config, self, self.actor, stall_restart_seconds=0.3)

    async def launch(self, config: CoreConfig) -> RunningCore:
        life = self.lives.pop(0) if len(self.lives) > 1 else self.lives[0]
        self.cores.append(ScriptedCore(life))
        return self.cores[-1]

    async def start(self) -> Ready:
        self.supervisor.start(self.known.append)
        return await asyncio.wait_for(self.supervisor.first_ready(), 10)

    async def until_cores(self, count: int, seconds: float) -> None:
        began = time.monotonic()
        while len(self.cores) < count or self.actor.unavailable() is not None:
            assert time.monotonic() - began < seconds
            await asyncio.sleep(0.01)


async def test_a_core_starts_serves_and_is_asked_to_leave() -> None:
    bench = Bench(healthy)
    assert await bench.start() == READY
    assert bench.known == [READY]
    assert bench.actor.unavailable() is None
    assert (bench.supervisor.num_starts, bench.supervisor.core_pid) == (1, 4321)
    await bench.supervisor.stop()
    assert not bench.cores[0].killed
    assert bench.supervisor.core_pid == 0


async def test_a_dead_core_is_replaced_quickly() -> None:
    bench = Bench(ready_then_gone, healthy)
    await bench.start()
    await bench.until_cores(2, seconds=2)
    assert bench.known == [READY, READY]
    assert bench.supervisor.num_starts == 2
    await bench.supervisor.stop()


async def test_between_two_cores_nothing_is_available() -> None:
    bench = Bench(ready_then_gone, loading)
    await bench.start()
    await asyncio.sleep(0.2)
    error = bench.actor.unavailable()
    assert error is not None
    assert error.retry_after_seconds is not None
    await asyncio.wait_for(bench.supervisor.stop(), 2)


async def test_a_frozen_core_is_killed_and_replaced() -> None:
    bench = Bench(frozen, healthy)
    await bench.start()
    await bench.until_cores(2, seconds=5)
    assert bench.cores[0].killed
    await bench.supervisor.stop()


async def test_a_bad_configuration_is_told_and_not_tried_again() -> None:
    bench = Bench(misconfigured)
    with pytest.raises(CoreStartError, match="no such model") as caught:
        await bench.start()
    assert caught.value.exit_code == 2
    await bench.supervisor.stop()
    assert len(bench.cores) == 1


async def test_a_first_core_that_always_crashes_is_given_up() -> None:
    bench = Bench(crashing)
    with pytest.raises(CoreStartError) as caught:
        await bench.start()
    assert caught.value.exit_code == 1
    await bench.supervisor.stop()
    assert len(bench.cores) == 3


async def test_a_crash_at_first_is_forgiven() -> None:
    bench = Bench(crashing, healthy)
    await bench.start()
    assert len(bench.cores) == 2
    await bench.supervisor.stop()


async def test_a_core_that_served_once_is_started_again_for_ever() -> None:
    bench = Bench(ready_then_gone, crashing, crashing, healthy)
    await bench.start()
    await bench.until_cores(4, seconds=8)
    await bench.supervisor.stop()


async def test_stopping_while_it_loads_kills_it_at_once() -> None:
    bench = Bench(loading)
    bench.supervisor.start(bench.known.append)
    starting = asyncio.create_task(bench.supervisor.first_ready())
    await asyncio.sleep(0.05)
    starting.cancel()
    began = time.monotonic()
    await bench.supervisor.stop()
    assert time.monotonic() - began < 2
    assert bench.cores[0].killed
