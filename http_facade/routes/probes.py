"""/healthz (this process lives), /readyz (the engine serves), /metrics."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST

from http_facade.errors import unavailable
from http_facade.facade import FACADE


class Health(Struct, frozen=True):
    status: Literal["ok"] = "ok"


class Readiness(Struct, frozen=True):
    status: Literal["ready"] = "ready"


async def healthz(request: web.Request) -> web.Response:
    """Knows nothing of the engine: a restart of this process would not help that one."""
    return _json(Health())


async def readyz(request: web.Request) -> web.Response:
    facade = request.app[FACADE]
    if facade.is_draining:
        raise unavailable("the server is shutting down")
    if not facade.is_ready:
        raise unavailable("the engine is not ready")
    return _json(Readiness())


async def metrics(request: web.Request) -> web.Response:
    return web.Response(
        body=request.app[FACADE].metrics.exposition(),
        headers={"Content-Type": CONTENT_TYPE_LATEST},
    )


def _json(document: Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")
