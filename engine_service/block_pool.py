"""The blocks of the KV cache: who holds each, which known prefix it has, which is reused next.

A block is in one of three states, told by two fields:

    state    ref_cnt   block_hash   it is found
    used     >= 1      or None      in the block tables of `ref_cnt` requests
    cached   0         set          in the free list, and by its hash until it is evicted
    free     0         None         in the free list

    free list    | free blocks | cached blocks, least to most recently used |
                  ^ allocate takes from here: a cached block is evicted only when none is free

The list is threaded through the blocks themselves, so that a block leaves its middle (a prefix
hit) in constant time. Whoever frees a chain of blocks frees its tail first, so the tail is also
evicted first; and whoever holds a block found by its hash holds all blocks before it in the chain.
Hence the index never has a hole: as long as a block is found, so is the whole prefix before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine_service.errors import InternalError

BlockHash = bytes  # names a block's content: its tokens and all tokens before them


class BlockPoolCorrupted(InternalError):
    """The bookkeeping contradicts itself; nothing computed from here on can be trusted."""


class Block:
    """One block of KV memory. Only the pool changes its fields."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.prev = self  # neighbours in the free list; itself while it is not in the list
        self.next = self


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self._index: dict[BlockHash, Block] = {}
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
        """One request fewer holds these blocks; those given first are evicted first."""
        for block in blocks:
            if block.ref_cnt < 1:
                raise BlockPoolCorrupted(f"block {block.block_id} freed, but nobody holds it")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                oldest = self._head.next
                self._insert(block, before=oldest if block.block_hash is None else self._head)

    # ------------------------------------------------------------ the prefix index

    def lookup(self, block_hash: BlockHash) -> Block | None:
        """The block of that content; the caller touches it before it allocates anything."""
        return self._index.get(block_hash)

    def publish(self, block: Block, block_hash: BlockHash) -> Block:
        """Makes a computed block, held by the caller, findable by its hash.

        Returns the block that the caller holds from now on: where another request has computed
        the same content meanwhile it is that one's, and the caller's own is given back. So every
        content has one block, and a hash found once leads to the whole chain before it.
        """
        holder = self._index.setdefault(block_hash, block)
        if holder is block:
            block.block_hash = block_hash
        else:
            self.touch((holder,))
            self.free((block,))
        return holder

    # ------------------------------------------------------------ the free list

    def _allocate_one(self) -> Block:
        block = self._head.next
        self._remove(block)
        if block.block_hash is not None:
            del self._index[block.block_hash]
            block.block_hash = None
        block.ref_cnt = 1
        return block

    def _insert(self, block: Block, before: Block) -> None:
        block.prev, block.next = before.prev, before
        block.prev.next = before.prev = block
        self._num_available += 1
        self._num_cached += block.block_hash is not None

    def _remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self._num_available -= 1
        self._num_cached -= block.block_hash is not None

    # ------------------------------------------------------------ proof

    def check_integrity(self) -> None:
        """Derives every invariant anew; raises BlockPoolCorrupted on the first that is broken."""
        listed = list(self._walk_free_list())
        cached = [block for block in listed if block.block_hash is not None]
        hashed = {b.block_hash: b for b in self._blocks if b.block_hash is not None}
        _expect(len(set(listed)) == len(listed), "a block is twice in the free list")
        _expect(listed[len(listed) - len(cached) :] == cached, "a free block is after a cached one")
        _expect(self._num_available == len(listed), "wrong count of available blocks")
        _expect(self._num_cached == len(cached), "wrong count of cached blocks")
        _expect(self._index == hashed, "the prefix index differs from the blocks' hashes")
        for block in self._blocks:
            in_list = block.next is not block
            _expect(block.ref_cnt >= 0, f"block {block.block_id} has a negative ref_cnt")
            _expect(in_list == (block.ref_cnt == 0), f"block {block.block_id} is held and listed")
        _expect(len(listed) == sum(b.ref_cnt == 0 for b in self._blocks), "a block is lost")

    def ref_counts(self) -> list[int]:
        """By block id."""
        return [block.ref_cnt for block in self._blocks]

    def _walk_free_list(self) -> Iterator[Block]:
        block = self._head.next
        for _ in range(self.num_blocks + 1):
            _expect(block.next.prev is block, "the links of the free list disagree")
            if block is self._head:
                return
            yield block
            block = block.next
        raise BlockPoolCorrupted("the free list does not come back to its head")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BlockPoolCorrupted(otherwise)
