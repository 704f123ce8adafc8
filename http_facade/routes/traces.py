"""/traces: the requests of the local trace store, and where one's time to first token went.

The page is a file of `http_facade/pages`; what it shows, it fetches from the routes under
/traces/data. They are there with `--enable-traces-page` only; they show requests of all tenants, so
they take the admin key, where there are keys (see `keys.ADMIN_ROUTES`).
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec
from aiohttp import web

from http_facade.errors import ApiError, invalid
from http_facade.routes.pages import file_answer
from http_facade.trace_reader import TraceFilter, TraceReader

MAX_LISTED: Final = 500
_MAX_TEXT_CHARS: Final = 200
_MAX_TTFT_MS: Final = 86_400_000.0
_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_SPAN_ID: Final = re.compile(r"[0-9a-f]{16}|")

TRACES: web.AppKey[TraceReader] = web.AppKey("traces", TraceReader)


def add_routes(app: web.Application, directory: Path) -> None:
    app[TRACES] = TraceReader(directory)
    app.cleanup_ctx.append(_closed)
    app.router.add_get("/traces", page)
    app.router.add_get("/traces/{trace_id}", page)
    app.router.add_get("/traces/data/requests", requests)
    app.router.add_get("/traces/data/requests/{trace_id}", request_)


async def page(request: web.Request) -> web.Response:
    if "trace_id" in request.match_info:
        _trace_id(request)
    return file_answer("traces.html")


async def requests(request: web.Request) -> web.Response:
    return _json(await request.app[TRACES].requests(_filter(request)))


async def request_(request: web.Request) -> web.Response:
    """Raises ApiError 404 where the store has nothing of it."""
    span_id = request.query.get("span", "")
    if not _SPAN_ID.fullmatch(span_id):
        raise invalid("span", "must have 16 hexadecimal digits, in lower case")
    found = await request.app[TRACES].request(_trace_id(request), span_id)
    if found is None:
        raise ApiError(
            404,
            "the trace store has no request with this trace id: spans are written about a second"
            " after they end, a trace that was not sampled is not there, and the oldest are not"
            " searched (`firsttoken ttft` does)",
            param="trace_id",
            code="trace_not_found",
        )
    return _json(found)


async def _closed(app: web.Application) -> AsyncIterator[None]:
    yield
    app[TRACES].close()


def _filter(request: web.Request) -> TraceFilter:
    query = request.query
    text = query.get("text", "").strip().lower()
    if len(text) > _MAX_TEXT_CHARS:
        raise invalid("text", f"must have at most {_MAX_TEXT_CHARS} characters")
    errors = query.get("errors", "")
    if errors not in ("", "0", "1"):
        raise invalid("errors", "must be 0 or 1")
    return TraceFilter(
        text=text,
        min_ttft_ms=_number(request, "min_ttft_ms", 0.0, _MAX_TTFT_MS, 0.0),
        errors_only=errors == "1",
        limit=int(_number(request, "limit", 1, MAX_LISTED, TraceFilter().limit)),
    )


def _number(request: web.Request, name: str, low: float, high: float, default: float) -> float:
    given = request.query.get(name, "")
    if not given:
        return default
    try:
        value = float(given)
    except ValueError:
        raise invalid(name, "must be a number") from None
    if not low <= value <= high:
        raise invalid(name, f"must be from {low:g} to {high:g}")
    return value


def _trace_id(request: web.Request) -> str:
    trace_id = request.match_info["trace_id"]
    if not _TRACE_ID.fullmatch(trace_id):
        raise ApiError(
            404,
            "a trace id has 32 hexadecimal digits, in lower case",
            param="trace_id",
            code="trace_not_found",
        )
    return trace_id


def _json(body: object) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        content_type="application/json",
        charset="utf-8",
        headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"},
    )
