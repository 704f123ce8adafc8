"""The blocks of the KV cache: who holds each, what is known to be in it, which is reused next.

A block is in one of three states, told by two fields:

    state    ref_cnt   parent_hash   it is found
    used     >= 1      or None       in the block tables of `ref_cnt` requests
    cached   0         set           in the free list, and by its content until it is evicted
    free     0         None          in the free list

    free list    | free blocks | cached blocks, least to most recently used |
                  ^ allocate takes from here: a cached block is evicted only when none is free

The list is threaded through the blocks themselves, so that a block leaves its middle (a prefix
hit) in constant time. Whoever frees a chain of blocks frees its tail first, so the tail is also
evicted first; and whoever holds a block found by its hash holds all blocks before it in the chain.
Hence the index never has a hole: as long as a block is found, so is the whole prefix before it.

**Content.** A block is known by its parent, the full block before it, and its own computed tokens:

    parent_hash ──> token_ids | t0 t1 t2 .. |   found from t0 on, by comparing; grows as computed
                              | t0 .... t15 |   when full also by its own block_hash, in one step

The hash of a full block is the parent of the next. So a prefix is walked block by block by hash,
and then compared with the children of the last one: the ones that begin as it goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from engine_service.block_hash import BlockHash
from engine_service.errors import InternalError

MAX_COMPARED_BLOCKS: Final = 32  # children with the same first token: the newest are looked at


class BlockPoolCorrupted(InternalError):
    """The bookkeeping contradicts itself; nothing computed from here on can be trusted."""


class Block:
    """One block of KV memory. Only the pool changes its fields."""

    __slots__ = ("block_hash", "block_id", "next", "parent_hash", "prev", "ref_cnt", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.parent_hash: BlockHash | None = None  # of the block before it, once a token is known
        self.token_ids: list[int] = []  # the computed ones, from the block's first slot on
        self.block_hash: BlockHash | None = None  # once published
        self.prev = self  # neighbours in the free list; itself while it is not in the list
        self.next = self


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}  # the published
        self._children: dict[tuple[BlockHash, int], dict[Block, None]] = {}  # the known, oldest
        # first, by parent and first token; the inner dictionaries are ordered sets
        self._head = Block(num_blocks)  # closes the free list to a ring; never handed out
        self._num_available = 0
        self._num_cached = 0
        for block in self._blocks:
            self._insert(block, before=self._head)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: free and cached."""
        return self._num_available

    @property
    def num_free(self) -> int:
        return self._num_available - self._num_cached

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self._num_available

    # ------------------------------------------------------------ holding blocks

    def allocate(self, num_blocks: int) -> list[Block]:
        """Hands out blocks with undefined content; the caller has checked `num_available`."""
        if num_blocks > self._num_available:
            raise BlockPoolCorrupted(
                f"{num_blocks} blocks asked for, {self._num_available} available"
            )
        return [self._allocate_one() for _ in range(num_blocks)]

    def touch(self, blocks: Iterable[Block]) -> None:
        """One more request holds these blocks."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """One request fewer holds these blocks; those given first are evicted first.

        What is known stays cached, except a part of a block that another one begins with too.
        """
        for block in blocks:
            if block.ref_cnt < 1:
                raise BlockPoolCorrupted(f"block {block.block_id} freed, but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None and self._is_doubled(block):
                    self._forget(block)
                oldest = self._head.next
                self._insert(block, before=oldest if block.parent_hash is None else self._head)

    # ------------------------------------------------------------ known content

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """The full block of that content; the caller touches it before it allocates anything."""
        return self._index.get(block_hash)

    def lookup_beginning(
        self, parent_hash: BlockHash, token_ids: Sequence[int]
    ) -> tuple[Block, int] | None:
        """The block after that parent which shares the most first tokens, and how many.

        It may be one in the making, to which its holder adds tokens, or have others after those.
        """
        best: tuple[Block, int] | None = None
        num_shared = 0
        for block in self._newest_children(parent_hash, token_ids[0]):
            num_equal = _num_equal(block.token_ids, token_ids)
            if num_equal > num_shared:
                best, num_shared = (block, num_equal), num_equal
                if num_equal == len(token_ids):
                    break
        return best

    def record(self, block: Block, parent_hash: BlockHash, token_ids: Sequence[int]) -> None:
        """The KV of these tokens, at least one, is computed in a block that the caller holds
        alone, after those recorded before."""
        if block.parent_hash is None:
            block.parent_hash = parent_hash
            self._children.setdefault((parent_hash, token_ids[0]), {})[block] = None
        block.token_ids += token_ids

    def publish(self, block: Block, block_hash: BlockHash) -> Block:
        """Makes a full, recorded block, held by the caller, findable by its hash.

        Returns the block that the caller holds from now on: where another request has computed
        the same content meanwhile it is that one's, and the caller's own is given back. So every
        full content has one block, and a hash found once leads to the whole chain before it.
        """
        holder = self._index.setdefault(block_hash, block)
        if holder is block:
            block.block_hash = block_hash
        else:
            self.touch((holder,))
            self._forget(block)
            self.free((block,))
        return holder

    def forget_all(self) -> int:
        """Nothing is known any more; who holds a block keeps it. How many blocks were known."""
        num_known = sum(block.parent_hash is not None for block in self._blocks)
        for block in self._blocks:
            block.parent_hash, block.block_hash, block.token_ids = None, None, []
        self._index.clear()
        self._children.clear()
        self._num_cached = 0
        return num_known

    def _forget(self, block: Block) -> None:
        """Of a block outside the free list."""
        if block.parent_hash is None:
            return
        key = (block.parent_hash, block.token_ids[0])
        siblings = self._children[key]
        del siblings[block]
        if not siblings:
            del self._children[key]
        if block.block_hash is not None:
            del self._index[block.block_hash]
        block.parent_hash, block.block_hash, block.token_ids = None, None, []

    def _is_doubled(self, block: Block) -> bool:
        """Whether another block begins with all its tokens."""
        if block.parent_hash is None:
            return False
        siblings = self._newest_children(block.parent_hash, block.token_ids[0])
        size = len(block.token_ids)
        return any(s is not block and s.token_ids[:size] == block.token_ids for s in siblings)

    def _newest_children(self, parent_hash: BlockHash, first_token_id: int) -> Iterator[Block]:
        children = self._children.get((parent_hash, first_token_id), {})
        return islice(reversed(children), MAX_COMPARED_BLOCKS)

    # ------------------------------------------------------------ the free list

    def _allocate_one(self) -> Block:
        block = self._head.next
        self._remove(block)
        self._forget(block)
        block.ref_cnt = 1
        return block

    def _insert(self, block: Block, before: Block) -> None:
        block.prev, block.next = before.prev, before
        block.prev.next = before.prev = block
        self._num_available += 1
        self._num_cached += block.parent_hash is not None

    def _remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._num_available -= 1
        self._num_cached -= block.parent_hash is not None

    # ------------------------------------------------------------ proof

    def check_integrity(self) -> None:
        """Derives every invariant anew; raises BlockPoolCorrupted on the first that is broken."""
        listed = list(self._walk_free_list())
        cached = [block for block in listed if block.parent_hash is not None]
        hashed = {b.block_hash: b for b in self._blocks if b.block_hash is not None}
        expect(len(set(listed)) == len(listed), "a block is twice in the free list")
        expect(listed[len(listed) - len(cached) :] == cached, "a free block is after a cached one")
        expect(self._num_available == len(listed), "wrong count of available blocks")
        expect(self._num_cached == len(cached), "wrong count of cached blocks")
        expect(self._index == hashed, "the prefix index differs from the blocks' hashes")
        children: dict[tuple[BlockHash, int], set[Block]] = {}
        for block in self._blocks:
            in_list = block.next is not block
            known = block.parent_hash is not None
            expect(block.ref_cnt >= 0, f"block {block.block_id} has a negative ref_cnt")
            expect(in_list == (block.ref_cnt == 0), f"block {block.block_id} is held and listed")
            expect(known == bool(block.token_ids), f"block {block.block_id} is half known")
            expect(known or block.block_hash is None, "a block without content is published")
            if block.parent_hash is not None:
                children.setdefault((block.parent_hash, block.token_ids[0]), set()).add(block)
        found = {key: set(blocks) for key, blocks in self._children.items()}
        expect(found == children, "the index of children differs from the blocks' content")
        expect(len(listed) == sum(b.ref_cnt == 0 for b in self._blocks), "a block is lost")

    def ref_counts(self) -> list[int]:
        """By block id."""
        return [block.ref_cnt for block in self._blocks]

    def _walk_free_list(self) -> Iterator[Block]:
        block = self._head.next
        for _ in range(self.num_blocks + 1):
            expect(block.next.prev is block, "the links of the free list disagree")
            if block is self._head:
                return
            yield block
            block = block.next
        raise BlockPoolCorrupted("the free list does not come back to its head")


def _num_equal(some: Sequence[int], others: Sequence[int]) -> int:
    """How many first tokens are the same."""
    pairs = zip(some, others, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(some), len(others)))


def expect(holds: bool, otherwise: str) -> None:
    """One invariant of the books."""
    if not holds:
        raise BlockPoolCorrupted(otherwise)
