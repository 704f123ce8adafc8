"""Which blocks hold the KV of which request's tokens, and which of them need no computing.

    tokens   |<---- found ----->|<- copied ->|<- computed since ->|<- new ->|
             0                                    num_computed_tokens      + num_new_tokens
    blocks   [ 7 ][  3  ][  12  ][     4     .      ][    9      ][    5     .. ]
             held together with   allocated; the pool is told of their tokens when they
             others               are computed, so that others find them from then on

A request's table grows in `allocate_slots` and goes back whole in `free`, its tail first.

**Prefix reuse.** Full blocks are found by their hash (`block_hash.py`), which a request makes once
for each. They are never written again, so they are shared as they are.

**Copy on write.** Where a prefix ends inside a block, somebody else writes on in it, or has: the
request gets a copy, made before its first step, and goes on in that. The samples of one prompt
share it like any others.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine_service.block_hash import BlockHash, hash_block, root_hash
from engine_service.block_pool import Block, BlockPool, expect
from engine_service.request import Request, RequestKey
from engine_service.scheduler_output import BlockCopy


class ComputedPrefix(NamedTuple):
    """The known beginning of a request; valid until anything is allocated."""

    blocks: Sequence[Block]  # full, to be shared
    num_tokens: int  # in those, and in the copied part
    copied_block: Block | None  # what a copy of gives the tokens beyond `blocks`

    @property
    def num_unheld_blocks(self) -> int:
        """Blocks that are available until the prefix is held."""
        held = self.blocks if self.copied_block is None else [*self.blocks, self.copied_block]
        return sum(block.ref_cnt == 0 for block in held)


NO_PREFIX = ComputedPrefix((), 0, None)


@dataclass(slots=True)
class _BlockTable:
    """The blocks of one admitted request, in token order."""

    blocks: list[Block]
    block_ids: array[int]  # of `blocks`, int32: a step's table is made of whole ones
    num_recorded_tokens: int  # whose KV the pool knows of
    is_private: bool  # nobody is to find what it holds: without caching, and after a flush


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
        # (source, destination), to be made before the owner's first step; until that is over the
        # source is held
        self._copies: dict[RequestKey, tuple[Block, Block]] = {}
        self._made_copies: set[RequestKey] = set()  # of those, by a step that is under way

    @property
    def capacity_tokens(self) -> int:
        """The longest context that a request alone in the pool can have."""
        return self.pool.num_blocks * self.block_size

    def block_ids(self, request: Request) -> array[int]:
        """The live table: the caller does not change it, nor keep it past the step."""
        return self._tables[request.key].block_ids

    def block_copies(self) -> list[BlockCopy]:
        """What to copy before the step; no block is in it both as a source and as a destination."""
        pairs = [pair for key, pair in self._copies.items() if key not in self._made_copies]
        return [BlockCopy(source.block_id, copy.block_id) for source, copy in pairs]

    def copies_are_made(self) -> None:
        """By a step that is under way: the next one must not make them again."""
        self._made_copies.update(self._copies)

    # ------------------------------------------------------------ life of a request's blocks

    def get_computed_blocks(self, request: Request) -> ComputedPrefix:
        """The longest known prefix; changes nothing. Pass it to `allocate_slots` at once.

        It leaves at least the last token to compute, whose logits are the next token's.
        """
        if not self.enable_caching or request.computes_whole_prompt:
            return NO_PREFIX
        blocks: list[Block] = []
        for position in range((request.num_tokens - 1) // self.block_size):
            block = self.pool.lookup(self.block_hash(request, position))
            if block is None:
                break
            blocks.append(block)
        whole = ComputedPrefix(blocks, len(blocks) * self.block_size, None)
        return self._with_beginning(request, whole)

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        prefix: ComputedPrefix = NO_PREFIX,
        num_spare_blocks: int = 0,
    ) -> list[Block] | None:
        """Room for `num_new_tokens` after the planned ones; the new blocks, often none.

        `prefix` opens the table of a request that has none yet. None means: it does not fit while
        `num_spare_blocks` stay available to others, and nothing was changed.
        """
        table = self._tables.get(request.key)
        if table is None:
            return self._open_table(request, num_new_tokens, prefix, num_spare_blocks)
        num_missing = self._num_blocks(request.num_planned_tokens + num_new_tokens)
        num_missing -= len(table.blocks)
        if num_missing <= 0:
            return []
        if num_missing > self.pool.num_available - num_spare_blocks:
            return None
        return self._extend(table, num_missing)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Makes what is computed known to others; to be called after each of its steps.

        A full block that another request published meanwhile takes the place of ours.
        """
        table = self._tables[request.key]
        while not table.is_private and table.num_recorded_tokens < num_computed_tokens:
            self._record_block(request, table, num_computed_tokens)
        self._end_copy(request)

    def free(self, request: Request) -> None:
        """Gives back all blocks of the request; one that holds none is no error."""
        table = self._tables.pop(request.key, None)
        if table is not None:
            self._end_copy(request)
            self.pool.free(reversed(table.blocks))

    def flush_prefix_cache(self) -> int:
        """Nothing computed so far is found any more. Who runs keeps its blocks for itself.

        Returns how many blocks could have been found.
        """
        for table in self._tables.values():
            table.is_private = True
        return self.pool.forget_all()

    def block_hash(self, request: Request, position: int) -> BlockHash:
        """Of the request's full block at that position in its table."""
        hashes = request.block_hashes
        while len(hashes) <= position:
            parent = self._parent_hash(request, len(hashes))
            start = len(hashes) * self.block_size
            hashes.append(hash_block(parent, request.token_ids[start : start + self.block_size]))
        return hashes[position]

    def publishes(self, request: Request) -> bool:
        """Whether others will find what this running request computes."""
        return not self._tables[request.key].is_private

    # ------------------------------------------------------------ how

    def _with_beginning(self, request: Request, whole: ComputedPrefix) -> ComputedPrefix:
        """`whole`, and what the beginning of one more block has of the request's next tokens.

        Left out if it takes the last block there is: a request must not wait for what it holds.
        """
        start = whole.num_tokens
        token_ids = request.token_ids[start : min(start + self.block_size, request.num_tokens - 1)]
        if not token_ids:
            return whole
        parent = self._parent_hash(request, len(whole.blocks))
        found = self.pool.lookup_beginning(parent, token_ids)
        if found is None:
            return whole
        block, num_shared = found
        prefix = ComputedPrefix(whole.blocks, start + num_shared, block)
        num_missing = self._num_blocks(request.num_tokens) - len(whole.blocks)
        fits = num_missing + prefix.num_unheld_blocks <= self.pool.num_available
        return prefix if fits else whole

    def _open_table(
        self, request: Request, num_new_tokens: int, prefix: ComputedPrefix, num_spare_blocks: int
    ) -> list[Block] | None:
        num_missing = self._num_blocks(prefix.num_tokens + num_new_tokens) - len(prefix.blocks)
        num_needed = num_missing + prefix.num_unheld_blocks + num_spare_blocks
        if num_needed > self.pool.num_available:
            return None
        self.pool.touch(prefix.blocks)
        table = _BlockTable(
            blocks=list(prefix.blocks),
            block_ids=array("i", [block.block_id for block in prefix.blocks]),
            num_recorded_tokens=len(prefix.blocks) * self.block_size,
            is_private=not self.enable_caching,
        )
        self._tables[request.key] = table
        if self.enable_caching and request.num_preemptions == 0:
            self.num_queried_tokens += request.num_tokens
            self.num_hit_tokens += prefix.num_tokens
        if prefix.copied_block is None:
            return self._extend(table, num_missing)
        self.pool.touch((prefix.copied_block,))
        new = self._extend(table, num_missing)
        self._copies[request.key] = (prefix.copied_block, new[0])
        return new

    def _end_copy(self, request: Request) -> None:
        pair = self._copies.pop(request.key, None)
        if pair is not None:
            self._made_copies.discard(request.key)
            self.pool.free(pair[:1])

    def _extend(self, table: _BlockTable, num_blocks: int) -> list[Block]:
        blocks = self.pool.allocate(num_blocks)
        table.blocks.extend(blocks)
        table.block_ids.extend(block.block_id for block in blocks)
        return blocks

    def _record_block(self, request: Request, table: _BlockTable, num_computed: int) -> None:
        """Tells the pool of the next computed tokens, up to the end of their block."""
        start = table.num_recorded_tokens
        position = start // self.block_size
        block_end = (position + 1) * self.block_size
        end = min(block_end, num_computed)
        parent = self._parent_hash(request, position)
        self.pool.record(table.blocks[position], parent, request.token_ids[start:end])
        table.num_recorded_tokens = end
        if end == block_end:
            block = self.pool.publish(table.blocks[position], self.block_hash(request, position))
            table.blocks[position] = block
            table.block_ids[position] = block.block_id

    def _parent_hash(self, request: Request, position: int) -> BlockHash:
        """Of what is before that block; it is known already."""
        return request.block_hashes[position - 1] if position else root_hash(request.cache_salt)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ proof

    def check_integrity(self, running: Collection[Request]) -> None:
        """Derives every invariant anew, given the requests that should hold blocks."""
        self.pool.check_integrity()
        keys = {request.key for request in running}
        expect(keys == set(self._tables), "other requests hold blocks than those that run")
        expect(keys >= set(self._copies), "a copy is to be made for nobody")
        expect(self._made_copies <= set(self._copies), "a copy was made for nobody")
        holders = Counter(i for table in self._tables.values() for i in table.block_ids)
        for request in running:
            self._check_hashes(request)
            self._check_content(request, self._tables[request.key])
            self._check_table(request, self._tables[request.key], holders)
        holders.update(source.block_id for source, _ in self._copies.values())
        held = [holders[block_id] for block_id in range(self.pool.num_blocks)]
        expect(self.pool.ref_counts() == held, "reference counts differ from the block tables")

    def _check_hashes(self, request: Request) -> None:
        parent, size = root_hash(request.cache_salt), self.block_size
        for position, block_hash in enumerate(request.block_hashes):
            tokens = request.token_ids[position * size : (position + 1) * size]
            right = len(tokens) == size and hash_block(parent, tokens) == block_hash
            expect(right, "a request has a wrong block hash")
            parent = block_hash

    def _check_table(self, request: Request, table: _BlockTable, holders: Counter[int]) -> None:
        ids = table.block_ids
        expect(
            [b.block_id for b in table.blocks] == ids.tolist(), "block ids differ from the blocks"
        )
        has_room = len(ids) * self.block_size >= request.num_computed_tokens
        expect(has_room, "computed tokens lie outside the blocks")
        in_the_making = ids[request.num_computed_tokens // self.block_size :]
        alone = all(holders[block_id] == 1 for block_id in in_the_making)
        expect(alone, "a block in the making is shared")
        if request.key in self._copies:
            copy = self._copies[request.key][1]
            expect(
                copy.block_id in in_the_making[:1], "a copy goes into another block than the next"
            )

    def _check_content(self, request: Request, table: _BlockTable) -> None:
        """The pool knows exactly what was computed in the blocks, or nothing of private ones."""
        size = self.block_size
        num_known = 0 if table.is_private else request.num_computed_tokens
        if request.key in self._copies:
            num_known -= num_known % size  # the copy is yet to be made
        for position, block in enumerate(table.blocks):
            tokens = request.token_ids[position * size : min((position + 1) * size, num_known)]
            expect(block.token_ids == tokens, "a block is known by other tokens than its computed")
            parent = self._parent_hash(request, position) if tokens else None
            expect(
                block.parent_hash == parent, "a block is known under another prefix than its own"
            )
            block_hash = request.block_hashes[position] if len(tokens) == size else None
            expect(block.block_hash == block_hash, "a block is published early, or not at all")
