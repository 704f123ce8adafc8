"""Who gives way when blocks or seats run out, and for whom.

When blocks run out, a running request takes those of the lowest rank: that one
waits again and later recomputes its tokens, mostly through the prefix cache. The lowest itself
pauses instead. So the first of the running always goes on, and one after the other all finish. A
waiting request is admitted only if every running one could still take a block: who gets in stays
for about `block_size` steps, so no two requests throw each other out in turns. And it preempts
nobody, but for one case: its tenant is below its share of the places, another that has had no less
is above its own, and a few victims make room at once. The requests of a tenant above its share also
give way before others of lower rank do.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final

from engine_service.kv_cache_manager import ComputedPrefix, KVCacheManager
from engine_service.request import Request
from engine_service.request_queues import RequestQueues

_MAX_VICTIMS: Final = 4  # of one claim


class Preemption:
    def __init__(
        self, kv_cache_manager: KVCacheManager, queues: RequestQueues, max_num_running: int
    ) -> None:
        self._kv = kv_cache_manager
        self._queues = queues
        self._max_num_running = max_num_running

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Room for its next tokens, at the cost of those after it; False if there are none."""
        running = self._queues.running
        while self._kv.allocate_slots(request, num_tokens) is None:
            last = running[-1]
            if last is request:
                return False  # it keeps its blocks: nobody before it has asked for them
            after = running[running.index(request) + 1 :]
            above = set(self._queues.fair_share.holders_above_share())
            self._queues.preempt(next(iter(self._to_give_way(after, above, last)), last))
        return True

    def yield_claimed_places(self, now_ns: int) -> None:
        """Preempts for the next in turn, if its tenant is below its share and it would not fit."""
        queues = self._queues
        while (request := queues.waiting.head(now_ns)) is not None:
            if not queues.fair_share.has_claim(request):
                return
            prefix = self._kv.get_computed_blocks(request)
            if not queues.follow(request, prefix.num_tokens):
                for victim in self._victims(request, prefix):
                    queues.preempt(victim)
                return

    def num_missing_blocks(self, request: Request, prefix: ComputedPrefix) -> int:
        """For its admission, with a block to spare for each that runs; below 0: none."""
        running, block_size = self._queues.running, self._kv.block_size
        num_new = -(-request.num_tokens // block_size) - len(prefix.blocks)
        num_growing = sum(map(self._takes_block, running))
        num_needed = num_new + prefix.num_unheld_blocks + len(running) + num_growing
        return num_needed - self._kv.pool.num_available

    # ------------------------------------------------------------ inside

    def _victims(self, request: Request, prefix: ComputedPrefix) -> list[Request]:
        """The few that make room for one with a claim, at once; none if that would take more."""
        running = self._queues.running
        num_seats = len(running) + 1 - self._max_num_running  # that are missing
        num_blocks = self.num_missing_blocks(request, prefix)
        victims: list[Request] = []
        if num_seats <= 0 and num_blocks <= 0:
            return victims
        places = self._queues.fair_share.places_for(request)
        if not places:
            return victims
        ref_counts = self._kv.pool.ref_counts()  # as if the prefix were held and victims gone
        for block in (*prefix.blocks, prefix.copied_block):
            if block is not None:
                ref_counts[block.block_id] += 1
        for victim in self._to_give_way(running, places, request):
            if places[victim.tenant] == 0:
                continue
            if len(victims) == _MAX_VICTIMS:
                break
            places[victim.tenant] -= 1
            victims.append(victim)
            num_seats -= 1
            num_blocks -= self._num_yielded_blocks(victim, ref_counts)
            if num_seats <= 0 and num_blocks <= 0:
                return victims
        return []

    def _num_yielded_blocks(self, victim: Request, ref_counts: list[int]) -> int:
        """By which its preemption lessens what is missing: its own, and those spared for it."""
        num_own = 0
        for block_id in self._kv.block_ids(victim):
            ref_counts[block_id] -= 1
            num_own += ref_counts[block_id] == 0
        return num_own + 1 + self._takes_block(victim)

    def _takes_block(self, running: Request) -> bool:
        """In this step, beyond what was allocated for its prompt."""
        num_planned, block_size = running.num_planned_tokens, self._kv.block_size
        num_missing = 1 if running.is_prefilling else running.num_expected_tokens - num_planned
        return num_planned % block_size == 0 or num_planned % block_size + num_missing > block_size

    def _to_give_way(
        self, running: list[Request], tenants: Container[str], spared: Request
    ) -> list[Request]:
        """Whom to preempt for, or in place of, one of the same or higher priority.

        The latest of those that were preempted least first, so that nobody is chosen over and over.
        """
        holders = [r for r in reversed(running) if r.tenant in tenants]
        holders = [r for r in holders if r.priority >= spared.priority]
        return sorted(holders, key=lambda r: r.num_preemptions)
