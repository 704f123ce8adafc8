"""One supervised child: started, ready when it says so, ended with its whole process group.

A child prints a line `{"event": "listening", ...}` on stdout when it is ready, and perhaps one
`{"event": "bound", ...}` as soon as it knows where that will be; its log is its stderr, which is
ours too. It leads a process group of its own, so that Ctrl-C reaches `serve` alone, which then
ends its children in order.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_DIE_WITH_PARENT = Path(__file__).with_name("die_with_parent.py")
_LINE_LIMIT_BYTES = 1024 * 1024
_SIGNAL_GAP_SECONDS = 0.1  # two signals that come at the same time are one to their receiver
_LAST_WORDS_SECONDS = 2.0

Where = Mapping[str, str]  # addresses, and what else a child's line says


class Child:
    """One run of a program; restart by making another."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.ready_at: float | None = None  # on the event loop's clock
        self._process = process
        loop = asyncio.get_running_loop()
        self._bound: asyncio.Future[Where | None] = loop.create_future()
        self._listening: asyncio.Future[Where | None] = loop.create_future()
        self._reader = asyncio.create_task(self._read_stdout())

    @classmethod
    async def start(cls, command: Sequence[str]) -> Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_DIE_WITH_PARENT)),
            *(str(os.getpid()), str(int(signal.SIGKILL))),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            limit=_LINE_LIMIT_BYTES,
            start_new_session=True,
        )
        return cls(process)

    async def bound(self) -> Where | None:
        """Where it will listen, once that is known; None when it ended before."""
        return await asyncio.shield(self._bound)

    async def listening(self) -> Where | None:
        """Where it listens, once it does; None when it ended before."""
        return await asyncio.shield(self._listening)

    async def wait(self) -> int:
        """The exit code as a shell would say it: 128 + n for a death by signal n."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def stop(self, grace_seconds: float, hurry: asyncio.Event) -> None:
        """Asks it to end and kills it after the grace. With `hurry`, from then on, it is asked
        once more, which children take as an order to end their requests now, and soon killed."""
        self._terminate()
        ended = asyncio.create_task(self.wait())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait(
            (ended, hurried), timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        hurried.cancel()
        if hurry.is_set():
            await asyncio.wait((ended,), timeout=_SIGNAL_GAP_SECONDS)
            self._terminate()
            await asyncio.wait((ended,), timeout=_LAST_WORDS_SECONDS)
        self.kill()
        await ended

    def _terminate(self) -> None:
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        if self._process.returncode is not None:  # reaped: the number may be another's by now
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read_stdout(self) -> None:
        stdout = self._process.stdout
        try:
            while stdout is not None and (line := await stdout.readline()):
                self._take_line(line)
        finally:
            _settle(None, self._bound, self._listening)

    def _take_line(self, line: bytes) -> None:
        where = _where(line)
        if where is None:
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
        elif where["event"] == "bound":
            _settle(where, self._bound)
        elif not self._listening.done():
            self.ready_at = asyncio.get_running_loop().time()
            _settle(where, self._bound, self._listening)


def _settle(where: Where | None, *futures: asyncio.Future[Where | None]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(where)


def _where(line: bytes) -> Where | None:
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict) or value.get("event") not in ("bound", "listening"):
        return None
    return {str(key): str(item) for key, item in value.items()}
