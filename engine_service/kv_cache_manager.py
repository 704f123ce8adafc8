"""Which blocks hold the KV of which request's tokens, and which of them need no computing.

    tokens   |<- computed_blocks ->|<--- computed since --->|<- new ->|
    blocks   [ 7 ][ 3 ][ 12 ]       [ 4 ][ 9 ]               [ 5 ]
             touched: found by       allocated, published     allocated; published by
             their hash              once computed            cache_blocks when full and computed
             0                                  num_computed_tokens   + num_new_tokens

A request's table grows in `allocate_slots` and goes back whole in `free`, its tail first.

**Prefix reuse.** A full block is named by a hash of its tokens and of the block before it, so
equal hashes mean equal prefixes. Hashes are the same in every engine, so that a router can tell
which engine has a prefix:

    root    = SHA-256(len(salt) salt len(adapter) adapter)      strings in UTF-8
    hash[i] = SHA-256(hash[i - 1] or root, token ids of block i)

with lengths and token ids as little-endian uint32. A request makes the hash of each block once.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from engine_service.block_pool import Block, BlockHash, BlockPool, BlockPoolCorrupted
from engine_service.request import Request, RequestKey


def root_hash(cache_salt: str, adapter: str = "") -> BlockHash:
    """What the chains of one salt and one adapter start from; no other chain meets them."""
    digest = hashlib.sha256()
    for text in (cache_salt.encode(), adapter.encode()):
        digest.update(struct.pack("<I", len(text)))
        digest.update(text)
    return digest.digest()


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}I", *token_ids)).digest()


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one admitted request, in token order."""

    blocks: list[Block]
    block_ids: list[int]  # of `blocks`
    num_published: int  # leading blocks that are in the prefix index


class KVCacheManager:
    def __init__(self, block_size: int, num_blocks: int, enable_caching: bool = True) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {block_size}")
        self.block_size = block_size
        self.enable_caching = enable_caching
        self.pool = BlockPool(num_blocks)
        self.num_queried_tokens = 0  # of requests admitted for the first time
        self.num_hit_tokens = 0  # of those, found in the cache
        self._tables: dict[RequestKey, _BlockTable] = {}

    @property
    def capacity_tokens(self) -> int:
        """The longest context that a request alone in the pool can have."""
        return self.pool.num_blocks * self.block_size

    def block_ids(self, request: Request) -> list[int]:
        """The live table: the caller does not change it, nor keep it past the step."""
        return self._tables[request.key].block_ids

    # ------------------------------------------------------------ life of a request's blocks

    def get_computed_blocks(self, request: Request) -> tuple[list[Block], int]:
        """The longest cached prefix as (blocks, num_tokens); changes nothing.

        It leaves at least the last token to compute, whose logits are the next token's. The
        blocks are valid until anything is allocated: pass them to `allocate_slots` at once.
        """
        blocks: list[Block] = []
        if self.enable_caching:
            for position in range((request.num_tokens - 1) // self.block_size):
                block = self.pool.lookup(self._block_hash(request, position))
                if block is None:
                    break
                blocks.append(block)
        return blocks, len(blocks) * self.block_size

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: Sequence[Block] = (),
        num_spare_blocks: int = 0,
    ) -> list[Block] | None:
        """Room for `num_new_tokens` after the computed ones; the new blocks, often none.

        `computed_blocks` open the table of a request that has none yet. None means: it does not
        fit while `num_spare_blocks` stay available to others, and nothing was changed.
        """
        table = self._tables.get(request.key)
        if table is None:
            return self._open_table(request, num_new_tokens, computed_blocks, num_spare_blocks)
        num_tokens = request.num_computed_tokens + num_new_tokens
        num_missing = -(-num_tokens // self.block_size) - len(table.blocks)
        if num_missing <= 0:
            return []
        if num_missing > self.pool.num_available - num_spare_blocks:
            return None
        return self._extend(table, num_missing)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Publishes the blocks that are full and computed; to be called after each step.

        A block that another request published meanwhile takes the place of ours in the table.
        """
        table = self._tables[request.key]
        if not self.enable_caching:
            return
        for position in range(table.num_published, num_computed_tokens // self.block_size):
            block_hash = self._block_hash(request, position)
            block = self.pool.publish(table.blocks[position], block_hash)
            table.blocks[position] = block
            table.block_ids[position] = block.block_id
            table.num_published += 1

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; one that holds none is no error."""
        table = self._tables.pop(request.key, None)
        if table is not None:
            self.pool.free(reversed(table.blocks))

    def _open_table(
        self,
        request: Request,
        num_new_tokens: int,
        computed_blocks: Sequence[Block],
        num_spare_blocks: int,
    ) -> list[Block] | None:
        num_cached_tokens = len(computed_blocks) * self.block_size
        num_missing = -(-num_new_tokens // self.block_size)
        num_evictable_hits = sum(block.ref_cnt == 0 for block in computed_blocks)
        num_needed = num_missing + num_evictable_hits + num_spare_blocks
        if num_needed > self.pool.num_available:
            return None
        self.pool.touch(computed_blocks)
        table = _BlockTable(
            blocks=list(computed_blocks),
            block_ids=[block.block_id for block in computed_blocks],
            num_published=len(computed_blocks),
        )
        self._tables[request.key] = table
        if self.enable_caching and request.num_preemptions == 0:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += num_cached_tokens
        return self._extend(table, num_missing)

    def _extend(self, table: _BlockTable, num_blocks: int) -> list[Block]:
        blocks = self.pool.allocate(num_blocks)
        table.blocks.extend(blocks)
        table.block_ids.extend(block.block_id for block in blocks)
        return blocks

    def _block_hash(self, request: Request, position: int) -> BlockHash:
        """Of the request's full block at that position in its table."""
        hashes = request.block_hashes
        while len(hashes) <= position:
            parent = hashes[-1] if hashes else root_hash(request.cache_salt)
            start = len(hashes) * self.block_size
            hashes.append(hash_block(parent, request.token_ids[start : start + self.block_size]))
        return hashes[position]

    # ------------------------------------------------------------ proof

    def check_integrity(self, running: Collection[Request]) -> None:
        """Derives every invariant anew, given the requests that should hold blocks."""
        self.pool.check_integrity()
        if {request.key for request in running} != set(self._tables):
            raise BlockPoolCorrupted("other requests hold blocks than those that run")
        for request in running:
            self._check_table(request, self._tables[request.key])
        held = Counter(i for table in self._tables.values() for i in table.block_ids)
        if self.pool.ref_counts() != [held[i] for i in range(self.pool.num_blocks)]:
            raise BlockPoolCorrupted("reference counts differ from the block tables")

    def _check_table(self, request: Request, table: _BlockTable) -> None:
        parent = root_hash(request.cache_salt)
        size = self.block_size
        for position, block_hash in enumerate(request.block_hashes):
            tokens = request.token_ids[position * size : (position + 1) * size]
            if len(tokens) < size or hash_block(parent, tokens) != block_hash:
                raise BlockPoolCorrupted("a request has a wrong block hash")
            parent = block_hash
        num_computed_blocks = request.num_computed_tokens // size
        if table.num_published != (num_computed_blocks if self.enable_caching else 0):
            raise BlockPoolCorrupted("a computed block is not published, or one that is not is")
        published, rest = table.blocks[: table.num_published], table.blocks[table.num_published :]
        if [b.block_hash for b in published] != request.block_hashes[: table.num_published]:
            raise BlockPoolCorrupted("a published block has another content than its request")
        if any(b.block_hash is not None or b.ref_cnt != 1 for b in rest):
            raise BlockPoolCorrupted("a block in the making is shared")
        if [b.block_id for b in table.blocks] != table.block_ids:
            raise BlockPoolCorrupted("block ids differ from the blocks")
        if len(table.blocks) * size < request.num_computed_tokens:
            raise BlockPoolCorrupted("computed tokens lie outside the blocks")
