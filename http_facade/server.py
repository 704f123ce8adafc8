"""The life of a facade process: listen, serve, drain, stop.

On SIGTERM or SIGINT: readiness says 503 and new requests are refused; running ones go on for at
most the shutdown timeout, then their streams end with an error event; exit code 0. A second signal
ends the wait at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass

from aiohttp import web
from opentelemetry.trace import TracerProvider

from access.certificates import CertificateError
from access.exposure import is_loopback, open_door_warning
from access.keys_file import KeysFileError
from clients.errors import EngineUnavailable
from http_facade.access_log import ACCESS_LOG
from http_facade.app import create_app
from http_facade.connections import CONNECTIONS
from http_facade.facade import FACADE, Facade
from http_facade.flags import FacadeConfig
from http_facade.keys import KEYS
from http_facade.listening import CannotListen, bind
from http_facade.protocol import FacadeProtocol
from http_facade.tls import HANDSHAKE_SECONDS, server_tls

_LAST_WORDS_SECONDS = 5.0  # for handlers to write their ends after they were told to
_BACKLOG = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningFacade:
    facade: Facade
    host: str
    port: int
    scheme: str = "http"

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"

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
    config: FacadeConfig,
    *,
    tracer_provider: TracerProvider | None = None,
    shares_port: bool = False,
) -> AsyncIterator[RunningFacade]:
    """Listens inside the block. `shares_port`: other processes listen on it, too.

    Raises CannotListen, KeysFileError, CertificateError."""
    with closing(bind(config.host, config.port, shares_port=shares_port)) as listener:
        app = create_app(config, tracer_provider=tracer_provider)
        runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,  # a client that is gone ends its generation
            shutdown_timeout=_LAST_WORDS_SECONDS,
        )
        try:
            await runner.setup()
            async with server_tls(config.edge) as tls, _accepting(runner, app, listener, tls):
                if not is_loopback(config.host) and not app[KEYS].is_required:
                    logger.warning(open_door_warning("SERVER", config.host))
                port = listener.getsockname()[1]
                scheme = "http" if tls is None else "https"
                yield RunningFacade(app[FACADE], config.host, port, scheme)
        finally:
            await runner.cleanup()


@asynccontextmanager
async def _accepting(
    runner: web.AppRunner,
    app: web.Application,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
) -> AsyncIterator[None]:
    """What aiohttp's sites do, with our protocol for a connection."""
    server = runner.server
    if server is None:
        raise RuntimeError("the runner was not set up")
    loop = asyncio.get_running_loop()
    accepting = await loop.create_server(
        lambda: FacadeProtocol(
            server, loop=loop, connections=app[CONNECTIONS], lines=app[ACCESS_LOG]
        ),
        sock=listener,
        backlog=_BACKLOG,
        ssl=tls,
        ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
    )
    try:
        yield
    finally:
        accepting.close()


async def serve(config: FacadeConfig, *, shares_port: bool = False) -> int:
    """Serves until a signal; returns the exit code. `shares_port`: see `running_facade`."""
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        async with running_facade(config, shares_port=shares_port) as running:
            print(json.dumps({"event": "listening", "http": running.url}), flush=True)
            engines = ", ".join(map(str, config.engines))
            logger.info("listening on %s, engines %s", running.url, engines)
            await stop.wait()
            logger.info("stopping: waiting for running requests")
            await _drain(running, config.shutdown_timeout_seconds, hurry)
    except (CannotListen, KeysFileError, CertificateError) as error:
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
