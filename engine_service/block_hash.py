"""The names of prefixes: equal hashes mean equal prefixes.

A full block is named by a hash of its tokens and of the block before it. Hashes are the same in
every engine, so that a router can tell which engine has a prefix:

    root    = SHA-256(len(salt) salt len(adapter) adapter)      strings in UTF-8
    hash[i] = SHA-256(hash[i - 1] or root, token ids of block i)

with lengths and token ids as little-endian uint32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

BlockHash = bytes  # of a full block: names its tokens and all tokens before them


@lru_cache(maxsize=1024)
def root_hash(cache_salt: str, adapter: str = "") -> BlockHash:
    """What the chains of one salt and one adapter start from; no other chain meets them."""
    digest = hashlib.sha256()
    for text in (cache_salt.encode(), adapter.encode()):
        digest.update(struct.pack("<I", len(text)))
        digest.update(text)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()
