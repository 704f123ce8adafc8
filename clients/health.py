"""Following an engine: its health and its load, across its deaths.

A dead engine breaks the connection. A frozen one keeps it and says nothing; then an unanswered
probe (health) or a report that does not come (load) tells, within `silence_seconds`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from grpc_health.v1 import health_pb2

from clients.connection import Connection
from clients.conversions import load_report_from_proto
from clients.errors import CallCancelled, DeadlineExceeded, EngineUnavailable
from clients.types import LoadReport
from protos import engine_pb2

_FIRST_RECONNECT_SECONDS = 0.1
_MAX_RECONNECT_SECONDS = 1.0


async def watch_health(connection: Connection) -> AsyncGenerator[bool, None]:
    """Whether the engine serves: at once, and at each change, until the client is closed."""
    last: bool | None = None
    try:
        async with aclosing(_health_observations(connection)) as observations:
            async for is_serving in observations:
                if is_serving != last:
                    last = is_serving
                    yield is_serving
    except CallCancelled:
        return


async def _health_observations(connection: Connection) -> AsyncGenerator[bool, None]:
    reconnect_seconds = _FIRST_RECONNECT_SECONDS
    while True:
        try:
            async with aclosing(_health_watch(connection)) as watch:
                async for is_serving in watch:
                    reconnect_seconds = _FIRST_RECONNECT_SECONDS
                    yield is_serving
        except (EngineUnavailable, DeadlineExceeded):
            pass
        yield False
        await asyncio.sleep(reconnect_seconds)
        reconnect_seconds = min(2 * reconnect_seconds, _MAX_RECONNECT_SECONDS)


async def _health_watch(connection: Connection) -> AsyncGenerator[bool, None]:
    """One Watch rpc, with a probe whenever it was quiet; ends or raises with the connection."""
    silence_seconds = connection.options.silence_seconds
    request = health_pb2.HealthCheckRequest()
    call = connection.open_stream(connection.stubs.health_watch, request)
    read = asyncio.ensure_future(call.read())
    try:
        while True:
            await asyncio.wait((read,), timeout=0.2 * silence_seconds)
            if not read.done():
                await connection.call(
                    connection.stubs.health_check, request, timeout=0.8 * silence_seconds
                )
                continue
            status = read.result()
            if status is None:
                return
            yield status.status == health_pb2.HealthCheckResponse.SERVING
            read = asyncio.ensure_future(call.read())
    finally:
        call.cancel()
        read.cancel()
        await asyncio.gather(read, return_exceptions=True)  # its failure was told otherwise


async def watch_load(connection: Connection) -> AsyncGenerator[LoadReport, None]:
    """Load reports as they come; EngineUnavailable once they stop coming."""
    silence_seconds = connection.options.silence_seconds
    call = connection.open_stream(connection.stubs.engine.WatchLoad, engine_pb2.WatchLoadRequest())
    try:
        while True:
            try:
                async with asyncio.timeout(silence_seconds):
                    message = await call.read()
            except TimeoutError:
                raise EngineUnavailable(
                    f"the engine sent no load report for {silence_seconds:g} seconds"
                ) from None
            except CallCancelled:
                return
            if message is None:
                raise EngineUnavailable("the engine ended its load reports")
            yield load_report_from_proto(message)
    finally:
        call.cancel()
