"""Prefixes that are being computed right now, and who waits for them instead of computing them too.

    leader     |<-- computed -->|[ next block ]|<- later ->|      running; found by the hash
    follower   |<--- cached --->|[ next block ]|<- other ->|      of its next block
                                |<- in common ------>|
                                                     it follows until the leader has come to here

A running request leads while full blocks of what it knew at its admission are still to be
computed. One that is about to be admitted, and whose first missing block is a leader's next one,
becomes its follower: it leaves the queue, so nobody stands behind it, and comes back once what
they have in common is computed and can be found in the cache. When the leader ends or is preempted
all come back at once; the first of them to be admitted leads the others. So nobody waits for a
block that no running request is going to compute, or that will not be found (after a flush).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine_service.block_hash import BlockHash
from engine_service.errors import InternalError
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request, RequestStatus

_Follower = tuple[int, tuple[int, int], Request]  # (tokens in common, rank, request)


class PrefixesInFlight:
    def __init__(self, kv_cache_manager: KVCacheManager) -> None:
        self._kv = kv_cache_manager
        self._leaders: dict[BlockHash, Request] = {}  # by the block it computes next
        self._next_block: dict[Request, BlockHash] = {}  # of each leader
        self._followers: dict[Request, list[_Follower]] = {}  # heaps; also of those that are gone
        self._following: dict[Request, Request] = {}  # follower: leader

    def __len__(self) -> int:
        """Followers."""
        return len(self._following)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._following)

    def is_following(self, request: Request) -> bool:
        return request in self._following

    # ------------------------------------------------------------ leaders

    def advance(self, request: Request) -> list[Request]:
        """To be called when it was admitted and when it has computed more of what it knew then.

        Returns the followers that need not wait any longer."""
        self._forget(request)
        if not self._kv.publishes(request):
            return self._release(request, request.num_tokens)
        position = request.num_computed_tokens // self._kv.block_size
        if (position + 1) * self._kv.block_size > request.num_admitted_tokens:
            return self._release(request, request.num_computed_tokens)
        block_hash = self._kv.block_hash(request, position)
        if self._leaders.setdefault(block_hash, request) is request:
            self._next_block[request] = block_hash
        return self._release(request, request.num_computed_tokens)

    def leave(self, request: Request) -> list[Request]:
        """It runs no more. Returns its followers."""
        self._forget(request)
        return self._release(request, request.num_tokens)

    def flush(self) -> list[Request]:
        """What is in flight will not be found either. Returns all followers."""
        released = list(self._following)
        for index in (self._leaders, self._next_block, self._followers, self._following):
            index.clear()
        return released

    def _forget(self, request: Request) -> None:
        block_hash = self._next_block.pop(request, None)
        if block_hash is not None:
            del self._leaders[block_hash]

    def _release(self, leader: Request, num_tokens: int) -> list[Request]:
        followers = self._followers.get(leader)
        if followers is None:
            return []
        released = []
        while followers and followers[0][0] <= num_tokens:
            request = heapq.heappop(followers)[2]
            if self._following.get(request) is leader:  # not gone meanwhile
                del self._following[request]
                released.append(request)
        if not followers:
            del self._followers[leader]
        return released

    # ------------------------------------------------------------ followers

    def leader_of(self, request: Request, num_cached_tokens: int) -> Request | None:
        """Who computes its next block now; changes nothing."""
        position = num_cached_tokens // self._kv.block_size
        num_usable_blocks = (request.num_tokens - 1) // self._kv.block_size
        if request.computes_whole_prompt or position >= num_usable_blocks or not self._leaders:
            return None
        return self._leaders.get(self._kv.block_hash(request, position))

    def follow(self, request: Request, num_cached_tokens: int) -> bool:
        """Makes a request that would be admitted now a follower, if its next block is under way."""
        leader = self.leader_of(request, num_cached_tokens)
        if leader is None:
            return False
        num_usable_blocks = (request.num_tokens - 1) // self._kv.block_size
        num_blocks = min(num_usable_blocks, leader.num_admitted_tokens // self._kv.block_size)
        num_common_tokens = self._common_blocks(request, leader, num_blocks) * self._kv.block_size
        followers = self._followers.setdefault(leader, [])
        heapq.heappush(followers, (num_common_tokens, request.rank, request))
        self._following[request] = leader
        return True

    def unfollow(self, request: Request) -> bool:
        """It is at its end; False if it followed nobody."""
        return self._following.pop(request, None) is not None

    def _common_blocks(self, request: Request, leader: Request, num_blocks: int) -> int:
        """How many of their first blocks are equal. Equal hashes mean equal prefixes: so bisect."""
        low, high = 0, num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            ours = self._kv.block_hash(request, middle - 1)
            if ours == self._kv.block_hash(leader, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low

    # ------------------------------------------------------------ proof

    def check_integrity(self) -> None:
        if {h: r for r, h in self._next_block.items()} != self._leaders:
            raise InternalError("the two indexes of leaders differ")
        for block_hash, leader in self._leaders.items():
            position = leader.num_computed_tokens // self._kv.block_size
            if self._kv.block_hash(leader, position) != block_hash:
                raise InternalError("a leader's next block is another")
        for leader in [*self._leaders.values(), *self._following.values()]:
            if leader.status is not RequestStatus.RUNNING:
                raise InternalError("a leader does not run")
        entries = {
            request: (leader, num_tokens)
            for leader, followers in self._followers.items()
            for num_tokens, _, request in followers
        }
        for request, leader in self._following.items():
            if request not in entries or entries[request][0] is not leader:
                raise InternalError("a follower is not known to its leader")
            if entries[request][1] <= leader.num_computed_tokens:
                raise InternalError("a follower waits for what is computed")
