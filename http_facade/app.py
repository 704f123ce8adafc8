"""The aiohttp application: its routes, and the engine connection that lives as long as it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from aiohttp import web
from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from clients.engine_client import EngineClient
from clients.options import ClientOptions
from http_facade.engine import EngineConnection
from http_facade.facade import FACADE, Facade
from http_facade.flags import FacadeConfig
from http_facade.metrics import FacadeMetrics
from http_facade.middleware import add_headers, around
from http_facade.routes import generations, models, probes

# A retry hint goes on to the HTTP client at once: it is the one to wait, not a held connection.
_CLIENT_OPTIONS = ClientOptions(max_retry_wait_seconds=0.0)


def create_app(
    config: FacadeConfig, *, tracer_provider: TracerProvider | None = None
) -> web.Application:
    """Call inside a running event loop. No tracer provider: the process's."""
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[around])
    app[FACADE] = Facade(
        config=config,
        connection=EngineConnection(EngineClient(config.engine, options=_CLIENT_OPTIONS)),
        metrics=FacadeMetrics(),
        tracer=trace.get_tracer("http_facade", tracer_provider=tracer_provider),
    )
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_engine_connection)
    app.router.add_post("/v1/chat/completions", generations.chat_completions)
    app.router.add_post("/v1/completions", generations.completions)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{model:.+}", models.get_model)
    app.router.add_get("/healthz", probes.healthz)
    app.router.add_get("/readyz", probes.readyz)
    app.router.add_get("/metrics", probes.metrics)
    return app


async def _engine_connection(app: web.Application) -> AsyncIterator[None]:
    connection = app[FACADE].connection
    following = asyncio.create_task(connection.follow())
    yield
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    await connection.client.close()
