"""What a trace remembers of a prompt, so that it can be said later why its prefix was not reused.

    tokens   |16|  32  |    64    |        128        | ...
             a hash of all tokens up to each of these lengths: equal hashes, equal beginnings

The hashes are of the tokens alone, whatever salt divides the cache, and short: they tell prompts
of one engine apart, and give none away.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Final

SHORTEST_TOKENS: Final = 16
_MAX_HASHES: Final = 20
_HASH_BYTES: Final = 6


def prefix_hashes(token_ids: Sequence[int]) -> list[str]:
    """Of the first 16, 32, 64, ... tokens, as far as there are so many."""
    data = array("I", token_ids).tobytes()
    item_bytes = array("I").itemsize
    hashing = hashlib.blake2b(digest_size=_HASH_BYTES)
    hashes: list[str] = []
    start, length = 0, SHORTEST_TOKENS
    while length <= len(token_ids) and len(hashes) < _MAX_HASHES:
        hashing.update(data[start * item_bytes : length * item_bytes])
        hashes.append(hashing.hexdigest())
        start, length = length, 2 * length
    return hashes


def salt_hash(cache_salt: str) -> str:
    """Equal for requests that may share cached prefixes."""
    salt = cache_salt.encode(errors="surrogateescape")
    return hashlib.blake2b(salt, digest_size=_HASH_BYTES, person=b"salt").hexdigest()
