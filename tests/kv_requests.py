"""A request's life as its KV cache manager sees it, without a scheduler."""

from __future__ import annotations

from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request


def admit(kv: KVCacheManager, request: Request) -> int | None:
    """Allocates for all known tokens; the number of cached ones, None if it does not fit."""
    prefix = kv.get_computed_blocks(request)
    if kv.allocate_slots(request, request.num_tokens - prefix.num_tokens, prefix) is None:
        return None
    request.num_computed_tokens = prefix.num_tokens
    return prefix.num_tokens


def compute(kv: KVCacheManager, request: Request) -> None:
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, request.num_computed_tokens)


def leave(kv: KVCacheManager, request: Request) -> None:
    kv.free(request)
    request.num_computed_tokens = 0


def cached_tokens(kv: KVCacheManager, request: Request) -> int:
    return kv.get_computed_blocks(request).num_tokens
