"""The life of a facade process: listen, serve, drain, stop.

On SIGTERM or SIGINT: readiness says 503 and new requests are refused; running ones go on for at
most the shutdown timeout, then their streams end with an error event; exit code 0. A second signal
ends the wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.trace import TracerProvider

from clients.errors import EngineUnavailable
from http_facade.app import create_app
from http_facade.facade import FACADE, Facade
from http_facade.flags import FacadeConfig
from http_facade.protocol import FacadeProtocol

_LAST_WORDS_SECONDS = 5.0  # for handlers to write their ends after they were told to
_BACKLOG = 1024

logger = logging.getLogger(__name__)


class CannotListen(Exception):
    """The address can't be listened on; the message names the flag to change."""


@dataclass(frozen=True, slots=True)
class RunningFacade:
    facade: Facade
    host: str
    port: int

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    async def drain(self, timeout_seconds: float) -> None:
        """Takes nothing new, waits for what runs, then ends what is left with an error."""
        self.facade.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self.facade.runs.wait_idle()
        self.facade.runs.fail_all(
            EngineUnavailable("the server is shutting down", reason="ENGINE_UNAVAILABLE")
        )


@asynccontextmanager
async def running_facade(
    config: FacadeConfig, *, tracer_provider: TracerProvider | None = None
) -> AsyncIterator[RunningFacade]:
    """Listens inside the block. Raises CannotListen."""
    listener = _listen(config.host, config.port)
    app = create_app(config, tracer_provider=tracer_provider)
    runner = web.AppRunner(
        app,
        handle_signals=False,
        handler_cancellation=True,  # a client that is gone ends its generation
        shutdown_timeout=_LAST_WORDS_SECONDS,
    )
    try:
        await runner.setup()
        async with _accepting(runner, listener):
            yield RunningFacade(app[FACADE], config.host, listener.getsockname()[1])
    finally:
        await runner.cleanup()
        listener.close()


@asynccontextmanager
async def _accepting(runner: web.AppRunner, listener: socket.socket) -> AsyncIterator[None]:
    """What aiohttp's sites do, with our protocol for a connection."""
    server = runner.server
    if server is None:
        raise RuntimeError("the runner was not set up")
    loop = asyncio.get_running_loop()
    accepting = await loop.create_server(
        lambda: FacadeProtocol(server, loop=loop), sock=listener, backlog=_BACKLOG
    )
    try:
        yield
    finally:
        accepting.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise CannotListen(_why_not(host, port, error)) from None
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use: choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} may not be listened on by this user: choose another with --port"
    return f"can't listen on {host} port {port}: {error.strerror}; see --host and --port"


async def serve(config: FacadeConfig) -> int:
    """Serves until a signal; returns the exit code."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running_facade(config) as running:
            print(json.dumps({"event": "listening", "http": running.url}), flush=True)
            logger.info("listening on %s, engine %s", running.url, config.engine)
            await stop.wait()
            logger.info("stopping: waiting for running requests")
            await _drain(running, config.shutdown_timeout_seconds, hurry)
    except CannotListen as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


async def _drain(running: RunningFacade, timeout_seconds: float, hurry: asyncio.Event) -> None:
    drained = asyncio.create_task(running.drain(timeout_seconds))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not drained.done():
        drained.cancel()
        await running.drain(0)
