"""State machines over the pool and the manager: whatever is asked in whatever order, the books
stay true, a prefix is found exactly as far as it was computed and not yet evicted or flushed, and
the memory of each request holds its own tokens."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_service.block_pool import Block, BlockPool
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request, RequestKey
from tests.core_fakes import make_request

NUM_BLOCKS = 6
ROOT = b"root"

# Short words of few letters: equal ones, and ones that begin with others, are common.
words = st.text("ab", min_size=1, max_size=2).map(str.encode)
FULL = 3  # letters


class BlockPoolMachine(RuleBasedStateMachine):
    """Against a model that keeps the free list as a plain list, and content as words."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[Block] = []  # one entry per reference
        self.free_ids = list(range(NUM_BLOCKS))
        self.cached: list[int] = []  # available ones with content, least recently used first
        self.content: dict[int, bytes] = {}  # by block id, oldest first

    @rule(num_blocks=st.integers(0, 3))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > self.pool.num_available:
            return
        expected = []
        for _ in range(num_blocks):
            if self.free_ids:
                expected.append(self.free_ids.pop(0))
            else:
                expected.append(self.cached.pop(0))
                del self.content[expected[-1]]
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
    @rule(data=st.data(), word=words)
    def record(self, data: st.DataObject, word: bytes) -> None:
        """Also publishes a block that gets full: a manager does so at once."""
        position = data.draw(st.integers(0, len(self.held) - 1))
        block = self.held[position]
        before = self.content.get(block.block_id, b"")
        after = (before + word)[:FULL]
        if len(before) == FULL or self.held.count(block) > 1:
            return
        self.pool.record(block, ROOT, after[len(before) :])
        self.content[block.block_id] = after
        if len(after) < FULL:
            return
        holder = self.pool.publish(block, after)
        self.held[position] = holder
        if holder is block:
            assert list(self.content.values()).count(after) == 1
        else:
            assert self.content[holder.block_id] == after
            if holder.block_id in self.cached:
                self.cached.remove(holder.block_id)
            del self.content[block.block_id]
            self._let_go(block)

    @rule(word=st.text("ab", min_size=FULL, max_size=FULL).map(str.encode))
    def hit(self, word: bytes) -> None:
        block = self.pool.lookup(word)
        assert (block is not None) == (word in self.content.values())
        if block is not None:
            self._hold(block)

    @rule(word=st.text("ab", min_size=1, max_size=FULL).map(str.encode), hold=st.booleans())
    def hit_the_beginning(self, word: bytes, hold: bool) -> None:
        found = self.pool.lookup_beginning(ROOT, word)
        longest = max((_num_shared(word, other) for other in self.content.values()), default=0)
        assert (0 if found is None else found[1]) == longest
        if found is not None:
            assert _num_shared(word, self.content[found[0].block_id]) == longest
            if hold:
                self._hold(found[0])

    @rule()
    def forget_all(self) -> None:
        assert self.pool.forget_all() == len(self.content)
        self.content.clear()
        self.free_ids, self.cached = self.free_ids + self.cached, []

    def _hold(self, block: Block) -> None:
        self.pool.touch([block])
        if block.block_id in self.cached:
            self.cached.remove(block.block_id)
        self.held.append(block)

    def _let_go(self, block: Block) -> None:
        if block in self.held:
            return
        word = self.content.get(block.block_id)
        others = [other for i, other in self.content.items() if i != block.block_id]
        if word is not None and len(word) < FULL and any(o.startswith(word) for o in others):
            del self.content[block.block_id]
        if block.block_id in self.content:
            self.cached.append(block.block_id)
        else:
            self.free_ids.insert(0, block.block_id)

    @invariant()
    def books_are_true(self) -> None:
        self.pool.check_integrity()
        assert self.pool.ref_counts() == [
            sum(block.block_id == i for block in self.held) for i in range(NUM_BLOCKS)
        ]
        assert self.pool.num_free == len(self.free_ids)
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_used == len({block.block_id for block in self.held})


def _num_shared(some: bytes, other: bytes) -> int:
    return max(n for n in range(len(some) + 1) if other.startswith(some[:n]))


class KVCacheManagerMachine(RuleBasedStateMachine):
    """Requests from few prefixes, so that hits, doubles, copies and evictions all happen.

    `memory` is what a model would have written: by slot, all tokens up to the slot's own.
    """

    BLOCK_SIZE, NUM_BLOCKS = 3, 12

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCacheManager(self.BLOCK_SIZE, num_blocks=self.NUM_BLOCKS)
        self.running: list[Request] = []
        self.preempted: list[Request] = []
        self.computed: set[Prefix] = set()  # all that may be found
        self.private: set[RequestKey] = set()  # what these compute is not to be found
        self.memory: dict[int, Prefix] = {}
        self.num_requests = 0

    @rule(
        prompt=st.builds(
            lambda length, ending: [0] * length + ending,
            st.integers(0, 10),
            st.lists(st.integers(0, 1), min_size=1, max_size=2),
        ),
        salt=st.sampled_from(["", "", "s"]),
        num_spare_blocks=st.integers(0, 2),
    )
    def submit(self, prompt: list[int], salt: str, num_spare_blocks: int) -> None:
        self.num_requests += 1
        request = make_request(f"r{self.num_requests}", prompt, cache_salt=salt)
        self._admit(request, num_spare_blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def fork(self, data: st.DataObject, more: list[int]) -> None:
        """Somebody goes on from where a running request is."""
        other = self._pick(data)
        self.submit([*other.token_ids, *more], other.cache_salt, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        request = self._pick(data)
        self._leave(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule(num_spare_blocks=st.integers(0, 2))
    def resume(self, num_spare_blocks: int) -> None:
        if self._admit(self.preempted[0], num_spare_blocks):
            del self.preempted[0]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self._leave(self._pick(data))

    @rule()
    def flush(self) -> None:
        self.kv.flush_prefix_cache()
        self.computed.clear()
        self.private = {request.key for request in self.running}

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.sampled_from([1, 2, 3, 5, 12]))
    def step(self, data: st.DataObject, num_tokens: int) -> None:
        """Of some requests; one that had arrived at its end has a token more to compute."""
        chosen = data.draw(st.lists(st.sampled_from(self.running), min_size=1, unique=True))
        for request in chosen:
            if request.num_computed_tokens == request.num_tokens:
                if self.kv.allocate_slots(request, 1) is None:
                    return
                request.append_output(num_tokens % 2)
        copies = self.kv.block_copies()
        destinations = {copy.destination for copy in copies}
        assert len(destinations) == len(copies)
        assert not destinations & {copy.source for copy in copies}
        for source, destination in copies:
            for offset in range(self.BLOCK_SIZE):
                tokens = self.memory.get(source * self.BLOCK_SIZE + offset, ("", ()))
                self.memory[destination * self.BLOCK_SIZE + offset] = tokens
        for request in chosen:
            self._compute(request, num_tokens)

    def _compute(self, request: Request, num_tokens: int) -> None:
        start = request.num_computed_tokens
        end = min(start + num_tokens, request.num_tokens)
        for position in range(start, end):
            self.memory[self._slot(request, position)] = _prefix(request, position + 1)
        request.num_computed_tokens = end
        self.kv.cache_blocks(request, end)
        if request.key not in self.private:
            self.computed |= {_prefix(request, length) for length in range(1, end + 1)}

    def _pick(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.running))

    def _admit(self, request: Request, num_spare_blocks: int) -> bool:
        prefix = self.kv.get_computed_blocks(request)
        num_found = prefix.num_tokens
        assert num_found < request.num_tokens
        assert num_found == 0 or _prefix(request, num_found) in self.computed
        before = (self.kv.pool.num_available, self.kv.pool.num_cached)
        num_missing = request.num_tokens - num_found
        new = self.kv.allocate_slots(request, num_missing, prefix, num_spare_blocks)
        if new is None:
            assert before == (self.kv.pool.num_available, self.kv.pool.num_cached)
            assert self.running or num_spare_blocks or request.num_tokens > self.kv.capacity_tokens
            return False
        assert self.kv.pool.num_available >= num_spare_blocks
        assert list(self.kv.block_ids(request)) == [
            block.block_id for block in [*prefix.blocks, *new]
        ]
        request.num_computed_tokens = num_found
        self.running.append(request)
        return True

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.kv.free(request)
        self.private.discard(request.key)

    def _slot(self, request: Request, position: int) -> int:
        block_id = self.kv.block_ids(request)[position // self.BLOCK_SIZE]
        return block_id * self.BLOCK_SIZE + position % self.BLOCK_SIZE

    @invariant()
    def books_are_true(self) -> None:
        self.kv.check_integrity(self.running)
        for request in self.running:
            num_blocks = -(-request.num_tokens // self.BLOCK_SIZE)
            assert len(self.kv.block_ids(request)) == num_blocks

    @invariant()
    def memory_holds_what_was_computed(self) -> None:
        """And the sources of copies still hold what is to be copied."""
        copied_from = {copy.destination: copy.source for copy in self.kv.block_copies()}
        for request in self.running:
            for position in range(request.num_computed_tokens):
                block, offset = divmod(self._slot(request, position), self.BLOCK_SIZE)
                slot = copied_from.get(block, block) * self.BLOCK_SIZE + offset
                assert self.memory[slot] == _prefix(request, position + 1)

    @invariant()
    def the_index_has_no_hole(self) -> None:
        """Whichever computed prefix is found, all its shorter ones are."""
        in_full_blocks = (p for p in self.computed if len(p[1]) % self.BLOCK_SIZE == 0)
        for salt, tokens in in_full_blocks:
            whole = make_request("probe", [*tokens, 9], cache_salt=salt)
            found = self.kv.get_computed_blocks(whole).blocks
            num_blocks = len(tokens) // self.BLOCK_SIZE
            last = self.kv.pool.lookup(self.kv.block_hash(whole, num_blocks - 1))
            assert (last is not None) == (len(found) == num_blocks)


Prefix = tuple[str, tuple[int, ...]]  # salt and tokens


def _prefix(request: Request, length: int) -> Prefix:
    return request.cache_salt, tuple(request.token_ids[:length])


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=150, stateful_step_count=50)
TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.settings = settings(max_examples=150, stateful_step_count=50)
