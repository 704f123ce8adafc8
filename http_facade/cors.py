"""Which pages of other sites may call from a browser (CORS): none, unless they are named.

A preflight carries no credentials by design, so it is answered before keys are looked at. Cookies
play no part here: a page sends its key itself, and credentials of the browser are never allowed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import hdrs, web

_ANY = "*"
_METHODS = "GET, HEAD, POST, DELETE, OPTIONS"
_MAX_AGE_SECONDS = "600"
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{1,2000}")
# What pages may read of an answer, besides what every page may.
_EXPOSED = ", ".join(
    (
        "x-request-id",
        "x-ignored-params",
        "x-should-retry",
        "retry-after",
        "retry-after-ms",
        *(
            f"x-ratelimit-{what}-{unit}"
            for what in ("limit", "remaining", "reset")
            for unit in ("requests", "tokens")
        ),
        "server-timing",
        "www-authenticate",
    )
)


class Cors:
    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._allows_any = _ANY in allowed_origins
        self._allowed = frozenset(origin.lower() for origin in allowed_origins)

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks beforehand; None: it isn't that, or may not."""
        if (
            request.method != hdrs.METH_OPTIONS
            or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers
            or self._allowed_origin(request) is None
        ):
            return None
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
            hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE_SECONDS,
        }
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        if _HEADER_NAMES.fullmatch(wanted):  # any: none of them has a meaning beyond its request
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
        return web.Response(status=204, headers=headers)

    def mark(self, request: web.Request, response: web.StreamResponse) -> None:
        """On every answer, so that a page can read errors, too."""
        if not self._allowed:
            return
        if not self._allows_any:
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)
        origin = self._allowed_origin(request)
        if origin is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED

    def allows(self, origin: str) -> bool:
        return self._allows_any or origin.lower() in self._allowed

    def _allowed_origin(self, request: web.Request) -> str | None:
        """As the header says it."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self.allows(origin):
            return None
        return _ANY if self._allows_any else origin


CORS: web.AppKey[Cors] = web.AppKey("cors", Cors)
