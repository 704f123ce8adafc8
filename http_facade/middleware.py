"""Around every route: request id, key and its limits, error envelope, metrics, access log.

Whatever a handler raises becomes an answer here, except a cancellation: the client is gone then
(aiohttp cancels the handler; a client that half-closes its socket counts as gone, too) and 499 is
logged.

    our name? -> preflight of a page -> room for it? -> key -> draining? -> key's limits -> route

The limits count POSTs: all else only reads, and must stay possible for a key at its limit.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import hdrs, web

from http_facade.access_log import ACCESS_LOG
from http_facade.cors import CORS
from http_facade.decode import ignored_header
from http_facade.errors import ApiError, from_http_exception, internal, overloaded, unavailable
from http_facade.facade import FACADE
from http_facade.hosts import HOSTS
from http_facade.keys import KEYS, PROBES
from http_facade.patience import PatientHandler
from http_facade.state import STATE, RequestState, new_state

CLIENT_GONE = 499
METRICS = "/metrics"  # also of a drain

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
        _leave(state, status)
        facade.metrics.ended(route, status, state)
        request.app[ACCESS_LOG].write(request, route, status, state)


async def _answer(
    request: web.Request, handler: Handler, state: RequestState
) -> web.StreamResponse:
    try:
        request.app[HOSTS].check(request)
        preflight = request.app[CORS].preflight(request)
        if preflight is not None:
            return preflight
        _admit(request, state)
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


def _admit(request: web.Request, state: RequestState) -> None:
    if _is_over_limit(request) and request.path not in PROBES:
        raise overloaded("the server has as many connections as it takes")
    keys = request.app[KEYS]
    state.key = key = keys.caller(request)
    if key is not None:
        state.tenant = key.tenant
    keys.check_opens(request, key)
    if request.path in PROBES:
        return
    if request.app[FACADE].is_draining and request.path != METRICS:
        raise unavailable("the server is shutting down")
    if key is not None and request.method == hdrs.METH_POST:
        state.allowance = keys.enter(key)


def _is_over_limit(request: web.Request) -> bool:
    connection = request.protocol
    return isinstance(connection, PatientHandler) and connection.is_over_limit


def _leave(state: RequestState, status: int) -> None:
    if state.body_share is not None:
        state.body_share.release()
    if state.allowance is not None:
        is_used = status < HTTPStatus.BAD_REQUEST or _is_callers_end(state, status)
        state.allowance.leave(state.prompt_tokens + state.completion_tokens if is_used else 0)


def _is_callers_end(state: RequestState, status: int) -> bool:
    """Who leaves, or sets a deadline that passes, has had the engine work for nothing; whoever was
    refused or failed has not."""
    return status == CLIENT_GONE or (status == HTTPStatus.GATEWAY_TIMEOUT and state.has_begun)


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """On every answer, streams and errors included."""
    state = request.get(STATE)
    if state is None:
        return
    mark(response, state)
    request.app[CORS].mark(request, response)
    if state.key is not None and request.method == hdrs.METH_POST:
        response.headers.update(request.app[KEYS].quota_headers(state.key))
    if state.ignored:
        response.headers["x-ignored-params"] = ignored_header(state.ignored)


def mark(response: web.StreamResponse, state: RequestState) -> None:
    response.headers["x-request-id"] = state.request_id
    response.headers["Server"] = "firsttoken"
