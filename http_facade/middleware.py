"""Around every route: request id, key, error envelope, metrics, and one line of access log.

Whatever a handler raises becomes an answer here, except a cancellation: the client is gone then
(aiohttp cancels the handler; a client that half-closes its socket counts as gone, too) and 499 is
logged. Prompts and answers are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from http_facade.decode import ignored_header
from http_facade.errors import ApiError, from_http_exception, internal, unavailable
from http_facade.facade import FACADE
from http_facade.state import STATE, RequestState, new_state

PROBES = frozenset(("/healthz", "/readyz"))
CLIENT_GONE = 499

access_log = logging.getLogger("http_facade.access")
logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    facade = request.app[FACADE]
    state = request[STATE] = new_state(request)
    route = _route(request)
    status = CLIENT_GONE
    facade.metrics.began(route)
    try:
        response = await _answer(request, handler, state)
        status = response.status
        return response
    finally:
        if status == CLIENT_GONE:
            state.error_code = "client_gone"
        facade.metrics.ended(route, status, state)
        _log(request, status, state)


async def _answer(
    request: web.Request, handler: Handler, state: RequestState
) -> web.StreamResponse:
    try:
        _check(request, state)
        return await handler(request)
    except ApiError as error:
        refusal = error
    except web.HTTPException as error:
        refusal = from_http_exception(error)
    except ConnectionError:  # the socket broke under a write
        raise
    except Exception:
        logger.exception("request %s failed", state.request_id)
        refusal = internal()
    state.error_code = refusal.code or str(refusal.status)
    return refusal.response()


def _check(request: web.Request, state: RequestState) -> None:
    facade = request.app[FACADE]
    if request.path in PROBES:
        return
    key = facade.config.api_key
    if key is not None and not _is_same(_given_key(request), key):
        raise ApiError(
            401,
            "no valid API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    state.tenant = _tenant(key)
    if facade.is_draining:
        raise unavailable("the server is shutting down")


def _given_key(request: web.Request) -> str:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.headers.get("x-api-key", "")


def _is_same(given: str, expected: str) -> bool:
    """In a time that depends on neither."""
    digests = [
        hashlib.sha256(key.encode(errors="surrogateescape")).digest() for key in (given, expected)
    ]
    return hmac.compare_digest(*digests)


def _tenant(key: str | None) -> str:
    """One key, one tenant. The engine is told no more of the key than this."""
    if key is None:
        return ""
    return hashlib.sha256(b"tenant\0" + key.encode(errors="surrogateescape")).hexdigest()[:16]


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, streams and errors included."""
    state = request.get(STATE)
    if state is None:
        return
    mark(response, state)
    if state.ignored:
        response.headers["x-ignored-params"] = ignored_header(state.ignored)


def mark(response: web.StreamResponse, state: RequestState) -> None:
    response.headers["x-request-id"] = state.request_id
    response.headers["Server"] = "firsttoken"


def _log(request: web.Request, status: int, state: RequestState) -> None:
    parts = [
        f"id={state.request_id}",
        f"method={request.method}",
        f"path={request.rel_url.raw_path[:200]}",
        f"status={status}",
        f"ms={state.elapsed_seconds() * 1000:.1f}",
    ]
    if state.operation:
        parts.append(f"prompt_tokens={state.prompt_tokens}")
        parts.append(f"completion_tokens={state.completion_tokens}")
    if state.ttft_seconds is not None:
        parts.append(f"ttft_ms={state.ttft_seconds * 1000:.1f}")
    if state.finish_reasons:
        parts.append(f"finish={','.join(state.finish_reasons)}")
    if state.error_code:
        parts.append(f"error={state.error_code}")
    access_log.info(" ".join(parts))
