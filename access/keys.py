"""API keys as they are held: a digest of each, whose it is, and what it may.

A key itself is never kept. Keys are found by comparing digests with all there are, in a time that
depends on none of them.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from access.limits import NO_LIMITS, Limits

NAME = re.compile(r"[A-Za-z0-9._:@-]{1,128}")  # of a key or a tenant


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str  # what logs call it
    digest: bytes = field(repr=False)  # SHA-256 of the key
    tenant: str  # whose requests it makes
    min_priority: int | None = None  # a request's priority is clamped; lower runs first
    max_priority: int | None = None
    limits: Limits = NO_LIMITS
    is_admin: bool = False  # opens what is for operators
    is_trusted: bool = False  # a front of the engine: says for which tenant a request is

    def priority(self, asked: int | None) -> int | None:
        """What a request that asks for it gets; None: the default."""
        if self.min_priority is None and self.max_priority is None:
            return asked
        priority = asked or 0
        if self.min_priority is not None:
            priority = max(priority, self.min_priority)
        if self.max_priority is not None:
            priority = min(priority, self.max_priority)
        return priority


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def is_writable(key: str) -> bool:
    """Whether it can travel in a header: printable ASCII without spaces."""
    return bool(key) and all("!" <= character <= "~" for character in key)


def plain_keys(keys: Sequence[str]) -> tuple[ApiKey, ...]:
    """Keys of a command line: no limits, each a tenant of its own, the same at every edge."""
    return tuple(
        ApiKey(
            id="api-key" if len(keys) == 1 else f"api-key-{number}",
            digest=digest_of(key),
            tenant=_own_tenant(key),
        )
        for number, key in enumerate(dict.fromkeys(keys), start=1)
    )


def admin_key(digest: bytes) -> ApiKey:
    return ApiKey(id="admin", digest=digest, tenant="admin", is_admin=True)


def trusted_key(digest: bytes) -> ApiKey:
    return ApiKey(id="facade", digest=digest, tenant="", is_trusted=True)


def _own_tenant(key: str) -> str:
    text = key.encode(errors="surrogateescape")
    return hashlib.sha256(b"tenant\0" + text).hexdigest()[:16]


def find_key(given: str, keys: Iterable[ApiKey]) -> ApiKey | None:
    """Looks at every key, also after it has found the one."""
    digest = digest_of(given)
    found: ApiKey | None = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found
