"""grpc.health.v1 over the core's heartbeat; nothing is generated to find out.

A watcher that doesn't read holds up nobody: each has its own event and writes when it can.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.engine_actor import EngineActor

ENGINE_SERVICE: Final = "firsttoken.v1.Engine"
_SERVICES: Final = ("", ENGINE_SERVICE)
_CHECK_SECONDS: Final = 0.5  # how late a silence is noticed

Context = grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it is untyped
    def __init__(self) -> None:
        self._serving = False
        self._watchers: set[asyncio.Event] = set()

    def set_serving(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            for watcher in self._watchers:
                watcher.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in _SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status at once, then whenever it changes."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        sent: int | None = None
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                    continue  # it may have changed meanwhile
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _status(self, service: str) -> int:
        """A ServingStatus."""
        answer = health_pb2.HealthCheckResponse
        if service not in _SERVICES:
            return int(answer.SERVICE_UNKNOWN)
        return int(answer.SERVING if self._serving else answer.NOT_SERVING)


async def report_health(actor: EngineActor, health: HealthServicer) -> None:
    """Runs for the life of the service."""
    while True:
        changed = actor.next_state_change
        health.set_serving(actor.unavailable() is None)
        try:
            async with asyncio.timeout(_CHECK_SECONDS):
                await changed.wait()
        except TimeoutError:
            pass  # nothing was said; a silence may have grown too long
