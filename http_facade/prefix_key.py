"""What requests have in common that should meet at one engine, because its KV cache is there.

The key is the name of the prompt's first blocks, exactly as an engine with blocks of 16 tokens
names them (`tests/unit/test_routing_keys.py` compares):

    | block 0 | block 1 | block 2 | block 3 | block 4 | ... the rest of the prompt
    |<---------- key: 64 tokens ----------->|          never looked at

How long a prefix to take is a choice between two losses. Too short, and all requests look alike: a
chat template's own opening (25 to 40 tokens in the usual ones) is common to all conversations and
would bring them all to one engine. Too long, and the text of the single user counts: requests with
one system prompt would be scattered. 64 tokens reach past the usual openings into the system prompt
or, without one, into the conversation's first question. What a shared prefix below 64 tokens
then loses is to be computed once at each engine, at most 63 tokens every time; and where many
prompts agree in their first 64 tokens and differ later, the bound on an engine's load
(`routing.py`) spreads them, or their caller does, by `prompt_cache_key`.

A shorter prompt gives 32 or 16 of its tokens, not all its full blocks: so two that begin alike
still agree when one is a few tokens longer. One without a full block has no key: there is nothing
to reuse.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

BLOCK_TOKENS = 16
_KEY_BLOCKS = (4, 2, 1)  # as many as the prompt fills

PrefixKey = bytes


def prefix_key(token_ids: Sequence[int], *, tenant: str, cache_salt: str) -> PrefixKey | None:
    """None: the prompt fills no block."""
    for num_blocks in _KEY_BLOCKS:
        if len(token_ids) >= num_blocks * BLOCK_TOKENS:
            return _block_hash(token_ids, num_blocks, _effective_salt(tenant, cache_salt))
    return None


def hint_key(prompt_cache_key: str, *, tenant: str, cache_salt: str) -> PrefixKey:
    """In place of the prefix: what callers say belongs together. Tenants' hints never meet."""
    root = _root_hash(_effective_salt(tenant, cache_salt))
    return hashlib.sha256(
        root + b"prompt_cache_key\0" + prompt_cache_key.encode(errors="surrogatepass")
    ).digest()


def _block_hash(token_ids: Sequence[int], num_blocks: int, salt: str) -> bytes:
    """The hash of block `num_blocks - 1`, which names all tokens up to its end."""
    name = _root_hash(salt)
    for start in range(0, num_blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        block = token_ids[start : start + BLOCK_TOKENS]
        name = hashlib.sha256(name + struct.pack(f"<{BLOCK_TOKENS}I", *block)).digest()
    return name


def _root_hash(salt: str, adapter: str = "") -> bytes:
    digest = hashlib.sha256()
    for text in (salt.encode(), adapter.encode()):
        digest.update(struct.pack("<I", len(text)))
        digest.update(text)
    return digest.digest()


def _effective_salt(tenant: str, cache_salt: str) -> str:
    """As the engine makes it: tenants share no cached prefix, so theirs need not meet either."""
    if not tenant and not cache_salt:
        return ""
    encoded = tenant.encode()
    digest = hashlib.sha256(struct.pack("<I", len(encoded)) + encoded)
    digest.update(cache_salt.encode())
    return digest.hexdigest()
