"""Under which salt a request's prefixes are cached: the tenant decides, the caller may narrow.

    tenant ""   no salt     ""                                    the prefixes that all share
    otherwise               SHA-256(len(tenant) tenant salt)      strings in UTF-8, hexadecimal

What a caller sends is hashed together with whose it is, never used as it is: a salt only divides
its own tenant's prefixes further, and no choice of it meets another tenant's. The length in front
keeps ("a", "bc") apart from ("ab", "c").
"""

from __future__ import annotations

import hashlib
import struct


def effective_cache_salt(tenant: str, cache_salt: str) -> str:
    """The same in every engine, so that a router can tell which engine has a prefix."""
    if not tenant and not cache_salt:
        return ""
    encoded = tenant.encode()
    digest = hashlib.sha256(struct.pack("<I", len(encoded)) + encoded)
    digest.update(cache_salt.encode())
    return digest.hexdigest()
