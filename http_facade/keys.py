"""Who calls: the key of a request, what it opens, and what its limits leave.

    Authorization: Bearer KEY  |  x-api-key: KEY  |  HTTP Basic with the key as password

Basic is for pages that a browser opens by itself. Browsers send it along unasked, also when
another site makes them ask; so it is taken only where nothing can be changed by it (GET, HEAD) or
where the browser says that the page that asks is ours.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import math
from collections.abc import AsyncIterator

from aiohttp import hdrs, web

from access.key_store import KeyStore
from access.keys import ApiKey
from access.limits import Allowance, KeyLimits, RateLimited
from http_facade.edge import EdgeConfig
from http_facade.errors import ApiError, rate_limited

PROBES = frozenset(("/healthz", "/readyz"))
ADMIN_ROUTES = ("/traces",)  # and what lies under them: other tenants' requests are seen there
_READS = frozenset((hdrs.METH_GET, hdrs.METH_HEAD))


class Keys:
    """Raises KeysFileError when it is made."""

    def __init__(self, config: EdgeConfig, limits: KeyLimits | None = None) -> None:
        admin = () if config.admin_key is None else (config.admin_key,)
        self._store = KeyStore(config.api_keys, extra_keys=admin, path=config.api_keys_file)
        self._limits = limits or KeyLimits()

    @property
    def is_required(self) -> bool:
        return self._store.is_required

    def caller(self, request: web.Request) -> ApiKey | None:
        """The caller's key; None where none is asked for. Raises ApiError 401."""
        if request.path in PROBES:
            return None
        key = self._store.find(_given_key(request))
        if key is None and (self.is_required or self._needs_admin(request)):
            raise _unauthenticated(request)
        return key

    def check_opens(self, request: web.Request, key: ApiKey | None) -> None:
        """Whether the caller's key opens this route. Raises ApiError 403."""
        if self._needs_admin(request) and not (key and key.is_admin):
            raise ApiError(
                403,
                "this path takes an admin key (--admin-key, or `admin: true` in the keys file)",
                type="permission_error",
                code="permission_denied",
            )

    def enter(self, key: ApiKey) -> Allowance:
        """A place for one request of this key. Raises ApiError 429."""
        try:
            return self._limits.enter(key.id, key.limits)
        except RateLimited as error:
            raise rate_limited(error.message, error.retry_after_seconds) from None

    def quota_headers(self, key: ApiKey) -> dict[str, str]:
        """What the key has left, as it is now."""
        headers = {}
        for name, quota in self._limits.quotas(key.id).items():
            headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(quota.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(quota.reset_seconds)
        return headers

    def _needs_admin(self, request: web.Request) -> bool:
        return _is_for_operators(request) and (self.is_required or self._store.has_admin)

    async def follow_file(self, app: web.Application) -> AsyncIterator[None]:
        """A cleanup context of the application."""
        following = asyncio.create_task(self._store.follow_file())
        yield
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


KEYS: web.AppKey[Keys] = web.AppKey("keys", Keys)


def reserve_tokens(allowance: Allowance | None, num_tokens: int) -> None:
    """Raises ApiError 429."""
    if allowance is None:
        return
    try:
        allowance.reserve_tokens(num_tokens)
    except RateLimited as error:
        raise rate_limited(error.message, error.retry_after_seconds) from None


def duration(seconds: float) -> str:
    """As OpenAI writes them: 0s, 17ms, 8.64s, 6m0s."""
    millis = math.ceil(seconds * 1000 - 1e-6)
    if 0 < millis < 1000:
        return f"{millis}ms"
    minutes, rest = divmod(millis, 60_000)
    text = f"{rest / 1000:g}s"
    return f"{minutes}m{text}" if minutes else text


# ---------------------------------------------------------------- what a request carries


def _given_key(request: web.Request) -> str:
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    if scheme.lower() == "basic" and _may_be_basic(request):
        return _password(token)
    return request.headers.get("x-api-key", "")


def _may_be_basic(request: web.Request) -> bool:
    is_own_page = request.headers.get("Sec-Fetch-Site") == "same-origin"
    return request.method in _READS or is_own_page


def _password(token: str) -> str:
    """Of a Basic credential; empty if it is none."""
    try:
        decoded = base64.b64decode(token.strip(), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError, ValueError):
        return ""
    return decoded.partition(":")[2]


def _is_for_operators(request: web.Request) -> bool:
    """By the route, which is what decides who answers; by the path where there is none."""
    resource = request.match_info.route.resource
    path = resource.canonical if resource is not None else request.path
    return any(path == route or path.startswith(route + "/") for route in ADMIN_ROUTES)


def _unauthenticated(request: web.Request) -> ApiError:
    is_page = request.method in _READS and "text/html" in request.headers.get(hdrs.ACCEPT, "")
    challenge = 'Basic realm="firsttoken", charset="UTF-8"' if is_page else "Bearer"
    return ApiError(
        401,
        "no valid API key: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`;"
        " a browser asks for it as a password",
        type="authentication_error",
        code="invalid_api_key",
        headers={hdrs.WWW_AUTHENTICATE: challenge},
    )
