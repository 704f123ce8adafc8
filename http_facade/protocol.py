"""The HTTP protocol of one connection: what never reaches a route has our envelope, too.

Two kinds of refusal are aiohttp's own: bytes that its parser can't take as a request, and an
`Expect` that it answers before any middleware. Both get the envelope and an `x-request-id` here.
Of a request that could not be parsed nothing is known, so that id is ours even if it carried one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, LineTooLong

from http_facade.access_log import AccessLog
from http_facade.connections import Connections
from http_facade.errors import ApiError, from_http_exception, internal, unsupported_encoding
from http_facade.middleware import mark
from http_facade.patience import PatientHandler
from http_facade.state import new_state

logger = logging.getLogger(__name__)


class FacadeProtocol(PatientHandler):
    __slots__ = ("_lines",)

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        connections: Connections,
        lines: AccessLog,
    ) -> None:
        super().__init__(manager, loop=loop, connections=connections)
        self._lines = lines

    def log_access(
        self, request: web.BaseRequest, response: web.StreamResponse, time: float | None
    ) -> None:
        """The middleware writes a line of its own."""

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """A body that is not encoded as its headers say is the caller's fault, and was answered."""
        if not isinstance(kw.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kw)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """`message` is the parser's: it quotes bytes of the request, and so isn't shown."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun: nothing else can be said on this socket")
        if status < 500:
            answer = self._refused(request, _unparsed(exc))
        else:
            logger.error("a request failed outside of every route", exc_info=exc)
            answer = self._refused(request, internal())
        answer.force_close()
        return answer

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if isinstance(resp, web.HTTPException):  # raised before the middleware could turn it
            resp = self._refused(request, from_http_exception(resp))
        return await super().finish_response(request, resp, start_time)

    def _refused(self, request: web.BaseRequest, error: ApiError) -> web.Response:
        state = new_state(request)
        state.error_code = error.code or str(error.status)
        answer = error.response()
        mark(answer, state)
        self._lines.write_unrouted(error.status, state)
        return answer


def _unparsed(exc: BaseException | None) -> ApiError:
    match exc:
        case ContentEncodingError():
            return unsupported_encoding()
        case LineTooLong():
            text = "the request line or a header is too long: at most 8190 bytes are taken"
            return ApiError(431, text, code="headers_too_large")
        case _:
            text = "what was sent is no valid HTTP request, or has more than 128 headers"
            return ApiError(400, text, code="invalid_http")
