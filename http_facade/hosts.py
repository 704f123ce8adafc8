"""By which names the server may be asked: so that no page in this machine's browser uses a server
without keys through a name of its own.

A server that listens on loopback and asks for no key trusts whoever reaches it, and a browser here
does. CORS keeps pages of other sites out; but a site can have its own name resolve to 127.0.0.1
once its page is loaded (DNS rebinding), and is of the same origin then. `Host` still tells the name
that was asked for, and `Origin` whose page asks.

    given names    those, and loopback
    none           loopback, where the server listens on it without keys; else any
    *              any

The probes answer to any name, as they do without a key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import hdrs, web

from access.exposure import is_loopback
from http_facade.cors import Cors
from http_facade.errors import ApiError
from http_facade.keys import PROBES

_ANY = "*"
_ANY_BELOW = "*."  # *.example: every name that ends so
_SAFE = frozenset((hdrs.METH_GET, hdrs.METH_HEAD, hdrs.METH_OPTIONS))  # change nothing
# [::1]:80, localhost:80, or, of a target in absolute form, ::1
_AUTHORITY = re.compile(
    r"\[(?P<six>[^\[\]]*)\](:[0-9]*)?|(?P<name>[^:\[\]]*)(:[0-9]*)?|(?P<bare>[0-9A-Fa-f:.]*)"
)
_MAX_SHOWN_CHARS = 200


class Hosts:
    def __init__(
        self, names: Sequence[str] | None, *, is_guarded: bool, allowed_origins: Cors
    ) -> None:
        """`is_guarded`: without names, only loopback's are taken."""
        given = [name.lower().removesuffix(".") for name in names or ()]
        self._takes_any = _ANY in given or (names is None and not is_guarded)
        self._names = frozenset(given)
        self._endings = tuple(name[1:] for name in given if name.startswith(_ANY_BELOW))
        self._allowed_origins = allowed_origins

    def check(self, request: web.Request) -> None:
        """Whether the server goes by the name that was asked for, and the page that asks may change
        anything. Of HTTP/1.0 without a `Host` the name is the address that was connected to; of a
        target in absolute form, its own. Raises ApiError 403."""
        if self._takes_any or request.path in PROBES:
            return
        if not self._is_ours(request.host):
            raise _refused(hdrs.HOST, request.host, "--allowed-hosts adds names")
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or request.method in _SAFE or self._allowed_origins.allows(origin):
            return
        if not self._is_ours(origin.partition("://")[2]):
            raise _refused(hdrs.ORIGIN, origin, "--allowed-origins adds pages")

    def _is_ours(self, authority: str) -> bool:
        name = _name(authority)
        return (
            name in self._names
            or name.endswith((".localhost", *self._endings))
            or is_loopback(name)
        )


def _name(authority: str) -> str:
    """Without port and brackets; of what is no authority, empty."""
    match = _AUTHORITY.fullmatch(authority)
    name = (match["six"] or match["name"] or match["bare"] or "") if match else ""
    return name.lower().removesuffix(".")


def _refused(header: str, value: str, remedy: str) -> ApiError:
    return ApiError(
        403,
        f"{header}: `{value[:_MAX_SHOWN_CHARS]}` is none of this server's names: it answers to"
        f" localhost and loopback addresses, and to the names it was given ({remedy})",
        type="permission_error",
        param=header,
        code=f"{header.lower()}_not_allowed",
    )


HOSTS: web.AppKey[Hosts] = web.AppKey("hosts", Hosts)
