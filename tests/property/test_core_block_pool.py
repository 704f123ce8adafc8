"""State machines over the pool and the manager: whatever is asked in whatever order, the books
stay true, and a prefix is found exactly as far as its blocks were computed and not yet evicted."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_service.block_pool import Block, BlockPool
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request
from tests.core_fakes import make_request

NUM_BLOCKS = 6


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model that keeps the free list as a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[Block] = []  # one entry per reference
        self.free_ids = list(range(NUM_BLOCKS))
        self.cached: dict[bytes, int] = {}  # available ones, least recently used first
        self.names: dict[int, bytes] = {}  # of published blocks, by id

    @rule(num_blocks=st.integers(0, NUM_BLOCKS))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > self.pool.num_available:
            return
        expected = []
        for _ in range(num_blocks):
            if self.free_ids:
                expected.append(self.free_ids.pop(0))
            else:
                name = next(iter(self.cached))
                block_id = self.cached.pop(name)
                del self.names[block_id]
                expected.append(block_id)
        blocks = self.pool.allocate(num_blocks)
        assert [block.block_id for block in blocks] == expected
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.free([block])
        self._let_go(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def publish(self, data: st.DataObject, name: bytes) -> None:
        position = data.draw(st.integers(0, len(self.held) - 1))
        block = self.held[position]
        if block.block_hash is not None or self.held.count(block) > 1:
            return  # a manager publishes a block once, before it is shared
        holder = self.pool.publish(block, name)
        self.held[position] = holder
        if holder is block:
            assert name not in self.names.values()
            self.names[block.block_id] = name
        else:
            assert self.names[holder.block_id] == name
            self.cached.pop(name, None)
            self._let_go(block)

    @rule(name=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def hit(self, name: bytes) -> None:
        block = self.pool.lookup(name)
        assert (block is not None) == (name in self.names.values())
        if block is not None:
            self.pool.touch([block])
            self.cached.pop(name, None)
            self.held.append(block)

    def _let_go(self, block: Block) -> None:
        if block in self.held:
            return
        name = self.names.get(block.block_id)
        if name is None:
            self.free_ids.insert(0, block.block_id)
        else:
            self.cached[name] = block.block_id

    @invariant()
    def books_are_true(self) -> None:
        self.pool.check_integrity()
        assert self.pool.ref_counts() == [
            sum(block.block_id == i for block in self.held) for i in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free == len(self.free_ids)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len({block.block_id for block in self.held})


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Requests from few prefixes, so that hits, doubles and evictions all happen."""

    BLOCK_SIZE = 2

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(self.BLOCK_SIZE, num_blocks=8)
        self.running: list[Request] = []
        self.computed: set[tuple[str, tuple[int, ...]]] = set()  # salted prefixes, whole blocks
        self.num_requests = 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        salt=st.sampled_from(["", "s"]),
        num_spare_blocks=st.integers(0, 2),
    )
    def admit(self, prompt: list[int], salt: str, num_spare_blocks: int) -> None:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", prompt, cache_salt=salt)
        blocks, num_cached_tokens = self.kv.get_computed_blocks(request)
        assert num_cached_tokens <= len(prompt) - 1
        for end in range(self.BLOCK_SIZE, num_cached_tokens + 1, self.BLOCK_SIZE):
            assert (salt, tuple(prompt[:end])) in self.computed
        before = (self.kv.pool.num_available, self.kv.pool.num_cached)
        num_missing = len(prompt) - num_cached_tokens
        new = self.kv.allocate_slots(request, num_missing, blocks, num_spare_blocks)
        if new is None:
            assert before == (self.kv.pool.num_available, self.kv.pool.num_cached)
            return
        assert self.kv.pool.num_available >= num_spare_blocks
        assert self.kv.block_ids(request) == [block.block_id for block in [*blocks, *new]]
        request.num_computed_tokens = num_cached_tokens
        self.running.append(request)

    def _pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.running))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 4))
    def compute(self, data: st.DataObject, num_tokens: int) -> None:
        request = self._pick(data)
        end = min(request.num_computed_tokens + num_tokens, request.num_tokens)
        request.num_computed_tokens = end
        self.kv.cache_blocks(request, end)
        for full in range(self.BLOCK_SIZE, end + 1, self.BLOCK_SIZE):
            self.computed.add((request.cache_salt, tuple(request.token_ids[:full])))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def generate(self, data: st.DataObject, token: int) -> None:
        request = self._pick(data)
        if request.num_computed_tokens < request.num_tokens:
            return
        if self.kv.allocate_slots(request, 1) is not None:
            request.append_output(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request = self._pick(data)
        self.running.remove(request)
        self.kv.free(request)

    @invariant()
    def books_are_true(self) -> None:
        self.kv.check_integrity(self.running)

    @invariant()
    def tables_cover_what_is_known(self) -> None:
        for request in self.running:
            num_blocks = -(-request.num_tokens // self.BLOCK_SIZE)
            assert len(self.kv.block_ids(request)) == num_blocks

    @invariant()
    def the_index_has_no_hole(self) -> None:
        """Whichever computed prefix is found, all its shorter ones are."""
        for salt, tokens in self.computed:
            whole = make_request("probe", [*tokens, 9], cache_salt=salt)
            _, num_found = self.kv.get_computed_blocks(whole)
            last = self.kv.pool.lookup(whole.block_hashes[-1]) if self._hash_all(whole) else None
            assert (last is not None) == (num_found == len(tokens))

    def _hash_all(self, request: Request) -> bool:
        return bool(self.kv._block_hash(request, request.num_tokens // self.BLOCK_SIZE - 1))


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
