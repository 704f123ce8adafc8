"""The life of `serve`'s two children, as one straight run.

    start engine -> its ports are bound -> start facade -> both listen -> say where -> keep both
                                                                                          |
    a signal, from any point -----------------> stop facade, then engine <-- one keeps failing

The facade comes up while the engine still loads its model.
A child that fails before it ever listened ends `serve` with its exit code: the input is at fault
(2) or the installation is. One that dies later is started again, sooner at first, and given up
only when it keeps failing. A second signal doesn't wait for running requests: it is handed on to
the children, which end their streams with an error, and who isn't gone soon is killed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from clients.launch.child import Child, Where

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """How to start one child. `pin` turns where it listened into arguments for its next start."""

    name: str
    command: Sequence[str]
    pin: Callable[[Where], Sequence[str]]
    grace_seconds: float  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    delays_seconds: Sequence[float] = (0.5, 1.0, 2.0, 4.0, 8.0)  # one per failure in a row
    steady_seconds: float = 30.0  # a child that listened so long has recovered


class _NeverListened(Exception):
    def __init__(self, child: Child) -> None:
        super().__init__()
        self.child = child  # it ends, or has ended


class _Kept:
    """A child's place: the plan stays, the process in it changes."""

    def __init__(self, plan: ChildPlan, child: Child) -> None:
        self.plan = plan
        self.child = child
        self._pinned: Sequence[str] = ()

    @classmethod
    async def start(cls, plan: ChildPlan) -> _Kept:
        return cls(plan, await Child.start(plan.command))

    async def restart(self) -> None:
        self.child = await Child.start([*self.plan.command, *self._pinned])

    async def listening(self) -> Where | None:
        """Where it listens, from its first start on; None when it ended before."""
        where = await self.child.listening()
        if where is not None and not self._pinned:
            self._pinned = self.plan.pin(where)
        return where


class Supervisor:
    def __init__(
        self,
        engine: ChildPlan,
        facade: Callable[[Where], ChildPlan],
        announce: Callable[[Where, Where], Awaitable[None]],
        policy: RestartPolicy = RestartPolicy(),
    ) -> None:
        """`facade` makes its plan from where the engine will listen; `announce` tells the user.

        It may wait for more than that both listen: it runs beside the watch over them.
        """
        self._engine = engine
        self._facade = facade
        self._announce = announce
        self._policy = policy
        self._kept: list[_Kept] = []  # in the order of their start
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit code: 0 after a signal, 1 when a second one forced the end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        serving = asyncio.create_task(self._serve())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        serving.cancel()
        stopping.cancel()
        await asyncio.wait({serving, stopping})
        await self._stop_children()
        if not serving.cancelled():
            return serving.result()
        return 1 if self._hurry.is_set() else 0

    async def _serve(self) -> int:
        """Ends when a child cannot be kept running; then with its exit code."""
        try:
            engine_at, facade_at = await self._start_both()
        except _NeverListened as error:
            return await error.child.wait() or 1
        announcing = asyncio.ensure_future(self._announce(engine_at, facade_at))
        keepers = [asyncio.create_task(self._keep_running(kept)) for kept in self._kept]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in (announcing, *keepers):
                task.cancel()
            await asyncio.wait([announcing, *keepers])

    async def _start_both(self) -> tuple[Where, Where]:
        """Returns where engine and facade listen; raises for the first that ended before."""
        engine = await self._start(self._engine)
        if (engine_at := await engine.child.bound()) is None:
            raise _NeverListened(engine.child)
        facade = await self._start(self._facade(engine_at))
        return await asyncio.gather(_where(engine), _where(facade))

    async def _start(self, plan: ChildPlan) -> _Kept:
        kept = await _Kept.start(plan)
        self._kept.append(kept)
        return kept

    async def _keep_running(self, kept: _Kept) -> int:
        """Ends when the child keeps failing, then with its last exit code; or when it has ended
        well, as a drained engine does: with 0."""
        failures = 0
        name, delays = kept.plan.name, self._policy.delays_seconds
        while True:
            await kept.listening()
            code = await kept.child.wait()
            if code == 0:
                _say(f"{name} was told to end, and so does all.")
                return 0
            failures = 1 if self._was_steady(kept.child) else failures + 1
            if failures > len(delays):
                _say(f"{name} keeps ending (exit code {code}); giving up.")
                return code
            delay = delays[failures - 1]
            _say(f"{name} ended with exit code {code}; starting it again in {delay:g} s.")
            await asyncio.sleep(delay)
            await kept.restart()

    def _was_steady(self, child: Child) -> bool:
        if child.ready_at is None:
            return False
        now = asyncio.get_running_loop().time()
        return now - child.ready_at >= self._policy.steady_seconds

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._hurry.set()
            return
        self._stopping.set()
        _say("stopping; a second signal stops at once.")

    async def _stop_children(self) -> None:
        """The facade first, so that it can end its requests on a living engine."""
        for kept in reversed(self._kept):
            await kept.child.stop(kept.plan.grace_seconds, self._hurry)


async def _where(kept: _Kept) -> Where:
    if (where := await kept.listening()) is None:
        raise _NeverListened(kept.child)
    return where


def _say(message: str) -> None:
    print(f"firsttoken: {message}", file=sys.stderr, flush=True)
