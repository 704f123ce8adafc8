"""The pool hands out, shares, caches and evicts blocks in a fixed order, and proves its books."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from engine_service.block_pool import (
    MAX_COMPARED_BLOCKS,
    Block,
    BlockPool,
    BlockPoolCorrupted,
)

ROOT = b"root"


def ids(blocks: Iterable[Block]) -> list[int]:
    return [block.block_id for block in blocks]


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    assert pool.num_free + pool.num_cached + pool.num_used == pool.num_blocks
    return pool.num_free, pool.num_cached, pool.num_used


def publish(pool: BlockPool, block: Block, name: bytes) -> Block:
    """As a full block whose tokens are the letters of its name."""
    pool.record(block, ROOT, name)
    return pool.publish(block, name)


def publish_chain(pool: BlockPool, blocks: list[Block], name: bytes) -> None:
    for position, block in enumerate(blocks):
        assert publish(pool, block, name + bytes([position])) is block


def beginning(pool: BlockPool, tokens: bytes, parent: bytes = ROOT) -> tuple[int, int] | None:
    found = pool.lookup_beginning(parent, tokens)
    return None if found is None else (found[0].block_id, found[1])


def test_blocks_are_handed_out_in_order_and_come_back_in_order() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert (ids(first), ids(second)) == ([0, 1], [2, 3, 4])
    assert counts(pool) == (0, 0, 5)
    pool.free(reversed(second))
    assert ids(pool.allocate(3)) == [2, 3, 4]


def test_a_published_block_is_found_after_it_is_freed() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    assert pool.lookup(b"a") is None
    publish(pool, block, b"a")
    pool.free([block])
    assert counts(pool) == (2, 1, 0)
    assert pool.lookup(b"a") is block
    pool.touch([block])
    assert counts(pool) == (2, 0, 1)


def test_free_blocks_go_before_cached_ones_and_a_chain_loses_its_tail_first() -> None:
    pool = BlockPool(6)
    old, new = pool.allocate(3), pool.allocate(2)
    publish_chain(pool, old, b"old")
    publish_chain(pool, new, b"new")
    pool.free(reversed(old))
    pool.free(reversed(new))
    # block 5 was never used; then the older chain from its tail; then the newer one
    assert [ids(pool.allocate(1))[0] for _ in range(6)] == [5, 2, 1, 0, 4, 3]
    assert pool.lookup(b"old\0") is None
    assert counts(pool) == (0, 0, 6)


def test_eviction_takes_only_what_it_needs() -> None:
    pool = BlockPool(3)
    chain = pool.allocate(3)
    publish_chain(pool, chain, b"c")
    pool.free(reversed(chain))
    pool.allocate(1)
    assert [pool.lookup(b"c" + bytes([i])) for i in range(3)] == [chain[0], chain[1], None]
    assert counts(pool) == (0, 2, 1)


def test_a_hit_moves_a_block_to_the_back_of_the_line() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    publish(pool, first, b"a")
    publish(pool, second, b"b")
    pool.free([first, second])
    pool.touch([first])
    pool.free([first])
    assert ids(pool.allocate(1)) == [second.block_id]


def test_a_block_is_used_until_its_last_holder_frees_it() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.touch([block])
    pool.free([block])
    assert counts(pool) == (1, 0, 1)
    pool.free([block])
    assert counts(pool) == (2, 0, 0)


def test_equal_content_ends_up_in_one_block() -> None:
    pool = BlockPool(3)
    mine, yours = pool.allocate(1)[0], pool.allocate(1)[0]
    assert publish(pool, mine, b"a") is mine
    assert publish(pool, yours, b"a") is mine
    assert (mine.ref_cnt, yours.ref_cnt) == (2, 0)
    assert counts(pool) == (2, 0, 1)


# ------------------------------------------------------------ beginnings of blocks


def test_a_block_is_found_from_its_first_token_on_while_it_is_in_the_making() -> None:
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    assert beginning(pool, b"abcd") is None
    for tokens, num_found in ((b"a", 1), (b"bc", 3), (b"X", 3)):
        pool.record(block, ROOT, tokens)
        assert beginning(pool, b"abcd") == (0, num_found)
    assert beginning(pool, b"abcX") == (0, 4)
    assert beginning(pool, b"aXcd") == (0, 1)
    assert beginning(pool, b"Xbcd") is None
    assert beginning(pool, b"abcd", b"another parent") is None
    assert counts(pool) == (2, 0, 1)


def test_the_longest_beginning_is_found_whoever_has_it() -> None:
    pool = BlockPool(4)
    full, part, short = pool.allocate(3)
    publish(pool, full, b"abcd")
    pool.record(part, ROOT, b"abX")
    pool.record(short, ROOT, b"a")
    assert beginning(pool, b"abcZ") == (full.block_id, 3)
    assert beginning(pool, b"abXd") == (part.block_id, 3)
    assert beginning(pool, b"aZ") == (short.block_id, 1)


def test_a_part_stays_cached_until_it_is_evicted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.record(block, ROOT, b"ab")
    pool.free([block])
    assert counts(pool) == (1, 1, 0)
    assert beginning(pool, b"abc") == (0, 2)
    pool.allocate(1)
    assert beginning(pool, b"abc") == (0, 2)
    pool.allocate(1)
    assert beginning(pool, b"abc") is None
    assert counts(pool) == (0, 0, 2)


@pytest.mark.parametrize(("other", "is_kept"), [(b"ab", 0), (b"abc", 0), (b"a", 1), (b"ax", 1)])
def test_a_part_that_another_block_begins_with_is_not_kept(other: bytes, is_kept: int) -> None:
    pool = BlockPool(2)
    mine, others = pool.allocate(2)
    pool.record(mine, ROOT, b"ab")
    pool.record(others, ROOT, other)
    pool.free([mine])
    assert counts(pool) == (1 - is_kept, is_kept, 1)


def test_only_so_many_blocks_are_compared_the_newest_ones() -> None:
    pool = BlockPool(MAX_COMPARED_BLOCKS + 2)
    for number in range(MAX_COMPARED_BLOCKS + 1):
        pool.record(pool.allocate(1)[0], ROOT, bytes([1, 100 + number]))
    assert beginning(pool, bytes([1, 100])) == (MAX_COMPARED_BLOCKS, 1)
    assert beginning(pool, bytes([1, 101])) == (1, 2)


def test_all_is_forgotten_at_once() -> None:
    pool = BlockPool(4)
    used, part, cached = pool.allocate(3)
    publish(pool, used, b"abcd")
    publish(pool, cached, b"efgh")
    pool.record(part, ROOT, b"ij")
    pool.free([cached])
    assert pool.forget_all() == 3
    assert counts(pool) == (2, 0, 2)
    assert [pool.lookup(name) for name in (b"abcd", b"efgh")] == [None, None]
    assert [beginning(pool, name) for name in (b"abcd", b"efgh", b"ijkl")] == [None] * 3
    pool.free([used, part])
    assert counts(pool) == (4, 0, 0)
    assert pool.forget_all() == 0


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_allocating_more_than_there_is_raises() -> None:
    pool = BlockPool(2)
    with pytest.raises(BlockPoolCorrupted, match="3 blocks asked for, 2 available"):
        pool.allocate(3)
    assert counts(pool) == (2, 0, 0)


def test_freeing_twice_raises() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(BlockPoolCorrupted, match="nobody holds it"):
        pool.free(blocks)


def _leak(pool: BlockPool, used: Block, cached: Block) -> None:
    used.ref_cnt = 0


def _steal(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.ref_cnt = 1


def _negative(pool: BlockPool, used: Block, cached: Block) -> None:
    used.ref_cnt = -1


def _forget_hash(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.block_hash = None


def _wrong_hash(pool: BlockPool, used: Block, cached: Block) -> None:
    used.block_hash = b"never published"


def _forget_content(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.parent_hash = None


def _forget_tokens(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.token_ids = []


def _wrong_parent(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.parent_hash = b"another parent"


def _unrecorded(pool: BlockPool, used: Block, cached: Block) -> None:
    used.parent_hash, used.token_ids = ROOT, [1]


def _break_link(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.prev = used


def _cut_list(pool: BlockPool, used: Block, cached: Block) -> None:
    cached.next = cached


@pytest.mark.parametrize(
    "corrupt",
    [
        _leak,
        _steal,
        _negative,
        _forget_hash,
        _wrong_hash,
        _forget_content,
        _forget_tokens,
        _wrong_parent,
        _unrecorded,
        _break_link,
        _cut_list,
    ],
)
def test_corruption_is_found(corrupt: Callable[[BlockPool, Block, Block], None]) -> None:
    pool = BlockPool(4)
    used, cached = pool.allocate(2)
    publish(pool, cached, b"a")
    pool.free([cached])
    pool.check_integrity()
    corrupt(pool, used, cached)
    with pytest.raises(BlockPoolCorrupted):
        pool.check_integrity()
