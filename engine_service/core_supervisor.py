"""Keeps one engine core alive: starts it, feeds its frames to the actor, replaces it when it dies.

    start ──> Ready ──> frames ... ──> gone ──> back-off ──> start
      └─ StartFailed or repeated crashes before the first Ready: the service gives up

A core is gone when it hangs up. One that says nothing for very long is killed first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from engine_service.config import CoreConfig
from engine_service.core_launcher import CoreLauncher, RunningCore
from engine_service.engine_actor import EngineActor
from engine_service.messages import Frame, PrefixCacheFlushed, Ready, StartFailed, StepFrame

logger = logging.getLogger(__name__)

_MAX_FIRST_STARTS: Final = 3
_BACK_OFF_SECONDS: Final = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)  # the last one repeats
_STABLE_SECONDS: Final = 60.0  # a core that lived longer starts the back-off anew
_STOP_SECONDS: Final = 5.0  # from Shutdown to exit: a step may have to end
_HANG_UP_SECONDS: Final = 0.5  # from hanging up to exit


class CoreStartError(Exception):
    """The first core could not start. `exit_code` 2: the configuration is at fault."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class CoreSupervisor:
    def __init__(
        self,
        config: CoreConfig,
        launcher: CoreLauncher,
        actor: EngineActor,
        stall_restart_seconds: float,
    ) -> None:
        self._config = config
        self._launcher = launcher
        self._actor = actor
        self._stall_restart_seconds = stall_restart_seconds
        self._core: RunningCore | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self._on_ready: Callable[[Ready], None] = lambda ready: None
        self._stopping = False
        self._last_start_seconds = 1.0
        self.num_starts = 0

    @property
    def core_pid(self) -> int:
        """0: it is down, or runs in this process."""
        return self._core.pid if self._core is not None else 0

    def start(self, on_ready: Callable[[Ready], None]) -> None:
        """`on_ready` is called with each core's Ready before anything is sent to that core."""
        self._on_ready = on_ready
        self._task = asyncio.create_task(self._keep_alive())

    async def first_ready(self) -> Ready:
        """Waits for the first core. Raises CoreStartError."""
        return await asyncio.shield(self._ready)

    async def stop(self) -> None:
        """Asks the core to leave, kills it if it doesn't. Call it once, also after a failure."""
        self._stopping = True
        asked = self._actor.shut_down_core()
        core = self._core
        if core is not None and not (asked and await _ends_within(core, _STOP_SECONDS)):
            core.kill()
        if self._task is not None:
            if core is None:
                self._task.cancel()  # it sleeps between two starts
            await asyncio.gather(self._task, return_exceptions=True)
        if self._ready.done():
            self._ready.exception()  # seen
        else:
            self._ready.cancel()

    async def _keep_alive(self) -> None:
        num_short_lives = 0
        while not self._stopping:
            await asyncio.sleep(_BACK_OFF_SECONDS[min(num_short_lives, len(_BACK_OFF_SECONDS) - 1)])
            ready_seconds = await self._live_once()
            num_short_lives = 0 if ready_seconds > _STABLE_SECONDS else num_short_lives + 1
            if not self._ready.done() and num_short_lives >= _MAX_FIRST_STARTS:
                self._ready.set_exception(
                    CoreStartError("the engine core could not start; its log says why", 1)
                )
            if self._ready.done() and self._ready.exception() is not None:
                return

    async def _live_once(self) -> float:
        """One core, from its start to its end; returns how long it was ready."""
        began = time.monotonic()
        self.num_starts += 1
        try:
            core = self._core = await self._launcher.launch(self._config)
        except OSError:
            logger.exception("the engine core's process could not be started")
            return 0.0
        ready_at: float | None = None
        try:
            if await self._await_ready(core):
                ready_at = time.monotonic()
                self._last_start_seconds = ready_at - began
                await self._pump(core)
        except Exception:
            logger.exception("the engine core's frames could not be handled")
        self._lost()
        await self._bury(core)
        return time.monotonic() - ready_at if ready_at is not None else 0.0

    def _lost(self) -> None:
        if not self._stopping:
            self._actor.core_lost(retry_after_seconds=max(1.0, self._last_start_seconds))

    async def _bury(self, core: RunningCore) -> None:
        """It has hung up, so it is on its way out; one that isn't is helped."""
        self._core = None
        await core.connection.close()
        if not await _ends_within(core, _HANG_UP_SECONDS):
            core.kill()
        exit_code = await core.wait()
        if not self._stopping:
            logger.error("the engine core ended with exit code %d", exit_code)

    async def _await_ready(self, core: RunningCore) -> bool:
        match await core.connection.receive():
            case Ready() as ready:
                self._on_ready(ready)
                self._actor.core_started(core.connection, ready)
                if not self._ready.done():
                    self._ready.set_result(ready)
                return True
            case StartFailed(message=message):
                logger.error("the engine core could not start: %s", message)
                if not self._ready.done():
                    self._ready.set_exception(CoreStartError(message, 2))
        return False

    async def _pump(self, core: RunningCore) -> None:
        while (frame := await self._next_frame(core)) is not None:
            match frame:
                case StepFrame():
                    self._actor.handle(frame)
                case PrefixCacheFlushed():
                    self._actor.prefix_cache_flushed(frame)

    async def _next_frame(self, core: RunningCore) -> Frame | None:
        try:
            async with asyncio.timeout(self._stall_restart_seconds):
                return await core.connection.receive()
        except TimeoutError:
            logger.error("the engine core said nothing for %s s", self._stall_restart_seconds)
            return None


async def _ends_within(core: RunningCore, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await core.wait()
    except TimeoutError:
        return False
    return True
