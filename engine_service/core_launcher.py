"""Starting an engine core and connecting to it: as a process of its own, or as a thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from typing import Final, Protocol

import msgspec

from engine_service.config import CoreConfig, ServiceConfig
from engine_service.core_process import serve_core
from engine_service.transport import CoreConnection, SocketConnection, ThreadConnection

_STDERR_FD: Final = 2

# The core's compute threads meet many times a layer. By default each spins for milliseconds until
# the last has come, on the very processor which that one needs when anything else runs here: seen
# to make a step of 0.2 s last 8 s beside one busy process. A short spin costs nothing otherwise.
_SHORT_SPIN: Final = {"GOMP_SPINCOUNT": "2000"}


class RunningCore(Protocol):
    @property
    def connection(self) -> CoreConnection: ...

    @property
    def pid(self) -> int:
        """0: it is a thread of this process."""

    def kill(self) -> None:
        """Ends it without asking; a thread ends after its step."""

    async def wait(self) -> int:
        """Its exit code, once it has ended."""


class CoreLauncher(Protocol):
    async def launch(self, config: CoreConfig) -> RunningCore: ...


class ProcessLauncher:
    """By exec, with one end of a socket pair inherited; never by a fork of a running gRPC."""

    def __init__(self, log_level: str, module: str = "engine_service.core_process") -> None:
        self._log_level = log_level
        self._module = module
        self._early: RunningCore | None = None

    async def launch_early(self, config: CoreConfig) -> None:
        """Starts the core that the next `launch` returns: it takes longest to be ready."""
        self._early = await self._start(config)

    async def launch(self, config: CoreConfig) -> RunningCore:
        early, self._early = self._early, None
        return early or await self._start(config)

    async def _start(self, config: CoreConfig) -> RunningCore:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            command = (
                sys.executable,
                "-m",
                self._module,
                f"--fd={theirs.fileno()}",
                f"--config={msgspec.json.encode(config).decode()}",
                f"--log-level={self._log_level}",
            )
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=_STDERR_FD,  # our stdout says where we listen, nothing else
                env=_SHORT_SPIN | os.environ,
                pass_fds=(theirs.fileno(),),
            )
        return _CoreProcess(process, await SocketConnection.open(ours))


class _CoreProcess:
    def __init__(self, process: asyncio.subprocess.Process, connection: SocketConnection) -> None:
        self._process = process
        self.connection: CoreConnection = connection
        self.pid = process.pid

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it was faster
            self._process.kill()

    async def wait(self) -> int:
        return await self._process.wait()


class ThreadLauncher:
    async def launch(self, config: CoreConfig) -> RunningCore:
        return _CoreThread(config)


class _CoreThread:
    pid = 0

    def __init__(self, config: CoreConfig) -> None:
        connection = ThreadConnection()
        self.connection: CoreConnection = connection
        self._mailbox = connection.channel.mailbox
        self._loop = asyncio.get_running_loop()
        self._exit_code: asyncio.Future[int] = self._loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(config, connection), name="engine-core", daemon=True
        )
        self._thread.start()

    def kill(self) -> None:
        self._mailbox.close()

    async def wait(self) -> int:
        return await asyncio.shield(self._exit_code)

    def _run(self, config: CoreConfig, connection: ThreadConnection) -> None:
        exit_code = 1
        try:
            exit_code = serve_core(config, connection.channel)
        finally:
            connection.channel.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._loop.call_soon_threadsafe(self._exit_code.set_result, exit_code)


async def open_launcher(config: ServiceConfig) -> CoreLauncher:
    """As the configuration says; a process, the first one, is on its way already."""
    if config.core_in_process:
        return ThreadLauncher()
    launcher = ProcessLauncher(config.log_level)
    await launcher.launch_early(config.core)
    return launcher
