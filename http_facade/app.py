"""The aiohttp application: its routes, and the following of its engines, as long as it lives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web
from opentelemetry import trace
from opentelemetry.trace import TracerProvider

from access.exposure import is_loopback
from http_facade.access_log import ACCESS_LOG, AccessLog
from http_facade.body_memory import BODY_MEMORY, BodyMemory
from http_facade.connections import CONNECTIONS, Connections
from http_facade.cors import CORS, Cors
from http_facade.engine_credentials import EngineTls, engine_client_options
from http_facade.engine_pool import EnginePool, engine_clients
from http_facade.facade import FACADE, Facade
from http_facade.flags import FacadeConfig
from http_facade.hosts import HOSTS, Hosts
from http_facade.keys import KEYS, Keys
from http_facade.metrics import FacadeMetrics
from http_facade.middleware import add_headers, around
from http_facade.placement import Placement
from http_facade.routes import generations, models, pages, probes, texts, traces
from http_facade.routing import Router
from http_facade.slow_traces import SlowTraces
from traces.setup import tracing_of


def create_app(
    config: FacadeConfig, *, tracer_provider: TracerProvider | None = None
) -> web.Application:
    """Call inside a running event loop. No tracer provider: the process's.

    Raises KeysFileError or CertificateError for files that can't be used.
    """
    edge = config.edge
    app = web.Application(middlewares=[around])
    tracing = tracing_of(tracer_provider)
    metrics = FacadeMetrics(tracing)
    engine_tls = None if edge.engine_ssl_ca is None else EngineTls(edge)
    engines = EnginePool(
        config.engines,
        engine_clients(engine_client_options(edge, engine_tls)),
        aliases=config.served_model_names,
        metrics=metrics.routing,
    )
    app[FACADE] = Facade(
        config=config,
        engines=engines,
        placement=Placement(engines, Router(config.routing_policy), metrics.routing),
        metrics=metrics,
        tracer=trace.get_tracer("http_facade", tracer_provider=tracer_provider),
        slow_traces=SlowTraces(config.trace_slow_ttft_ms / 1000, engines, tracing),
    )
    app[KEYS] = keys = Keys(edge)
    app[CORS] = cors = Cors(edge.allowed_origins)
    app[HOSTS] = Hosts(
        edge.allowed_hosts,
        is_guarded=is_loopback(config.host) and not keys.is_required,
        allowed_origins=cors,
    )
    app[CONNECTIONS] = Connections(config.max_connections, metrics.connections)
    app[BODY_MEMORY] = BodyMemory(config.max_total_body_bytes, metrics.body_bytes)
    app[ACCESS_LOG] = AccessLog(edge.access_log, with_prompts=edge.log_prompts)
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(keys.follow_file)
    if engine_tls is not None:
        app.cleanup_ctx.append(engine_tls.follow_files)
    app.cleanup_ctx.append(_followed_engines)
    app.router.add_post("/v1/chat/completions", generations.chat_completions)
    app.router.add_post("/v1/completions", generations.completions)
    app.router.add_post("/v1/chat/completions/render", texts.render)
    app.router.add_post("/tokenize", texts.tokenize)
    app.router.add_post("/detokenize", texts.detokenize)
    app.router.add_get("/v1/models", models.list_models)
    app.router.add_get("/v1/models/{model:.+}", models.get_model)
    app.router.add_get("/healthz", probes.healthz)
    app.router.add_get("/readyz", probes.readyz)
    app.router.add_get("/metrics", probes.metrics)
    app.router.add_get("/openapi.json", pages.openapi)
    app.router.add_get("/docs", pages.docs_page)
    app.router.add_get("/", pages.chat_page)
    app.router.add_get("/assets/{name}", pages.asset)
    if config.enable_traces_page and config.trace_dir is not None:
        traces.add_routes(app, Path(config.trace_dir))
    return app


async def _followed_engines(app: web.Application) -> AsyncIterator[None]:
    async with app[FACADE].engines.following():
        yield
