"""Where each request is, and the moves between: who decides on a move is the scheduler.

    place                    statuses               holds blocks
    waiting for its grammar  WAITING_FOR_GRAMMAR
    waiting queue            WAITING, PREEMPTED
    followers                WAITING, PREEMPTED      (of a leader in `prefixes_in_flight`)
    running, by rank         RUNNING                exactly these

Each request is in one place. All that is kept beside the places (blocks, deadlines, what tenants
have, prefixes in flight) is kept true by the moves, and proved by `check_integrity`.
"""

from __future__ import annotations

from bisect import insort

from engine_service.config import SchedulerConfig
from engine_service.deadlines import Deadlines
from engine_service.errors import InternalError, RequestIdInUse
from engine_service.fair_share import FairShare
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.prefixes_in_flight import PrefixesInFlight
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.waiting_queue import PATIENCE, WaitingQueue, rank_of, remove_sorted

_QUEUED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class RequestQueues:
    def __init__(self, config: SchedulerConfig, kv_cache_manager: KVCacheManager) -> None:
        self._kv = kv_cache_manager
        self._requests: dict[str, dict[int, Request]] = {}  # the unfinished, by id and sample
        self._num_added = 0
        self.running: list[Request] = []  # by rank
        self.fair_share = FairShare(config.tenant_weights)
        aging_ns = round(config.priority_aging_seconds * 1e9)
        self.waiting = WaitingQueue(self.fair_share, aging_ns)
        self.in_flight = PrefixesInFlight(kv_cache_manager)
        self.deadlines = Deadlines()
        self._num_waiting_for_grammar = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.in_flight) + self._num_waiting_for_grammar

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def find(self, key: RequestKey) -> Request | None:
        request_id, index = key
        return self._requests.get(request_id, {}).get(index)

    def keys_of(self, request_id: str) -> list[RequestKey]:
        return [request.key for request in self._requests.get(request_id, {}).values()]

    # ------------------------------------------------------------ moves

    def add(self, request: Request, prefill_ns: int = 0) -> None:
        """`prefill_ns`: what its prompt takes alone, as far as that is known."""
        samples = self._requests.setdefault(request.request_id, {})
        if request.index in samples:
            raise RequestIdInUse(f"request id {request.request_id} is in use", field="request_id")
        samples[request.index] = request
        self._num_added += 1
        due_ns = self.waiting.due_ns(request)
        request.rank = (due_ns, self._num_added)
        request.place = (due_ns + PATIENCE * prefill_ns, self._num_added)
        self.fair_share.joined(request)
        self.deadlines.add(request)
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._num_waiting_for_grammar += 1
        else:
            self.waiting.add(request)

    def grammar_ready(self, request: Request) -> None:
        request.status = RequestStatus.WAITING
        self._num_waiting_for_grammar -= 1
        self.waiting.add(request)

    def follow(self, request: Request, num_cached_tokens: int) -> bool:
        """Puts the next of the queue aside if its next block is being computed for another."""
        follows = self.in_flight.follow(request, num_cached_tokens)
        if follows:
            self.waiting.remove(request)
        return follows

    def start(self, request: Request, num_cached_tokens: int) -> None:
        """Its blocks are allocated."""
        self.waiting.remove(request)
        insort(self.running, request, key=rank_of)
        self.fair_share.started(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        request.num_admitted_tokens = request.num_tokens
        self._requeue(self.in_flight.advance(request))

    def advance(self, request: Request, num_tokens: int) -> None:
        """That many more of its tokens are computed; they were in flight."""
        is_prefill = request.num_computed_tokens < request.num_admitted_tokens
        request.num_in_flight_tokens -= num_tokens
        request.num_computed_tokens += num_tokens
        self._kv.cache_blocks(request, request.num_computed_tokens)
        if is_prefill:
            self._requeue(self.in_flight.advance(request))

    def preempt(self, request: Request) -> None:
        """Back to its place in the queue; its output stays, its KV has to be computed again."""
        self._stop(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_in_flight_tokens = request.num_pending_outputs = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(request)

    def end(self, request: Request, status: RequestStatus) -> None:
        """The one way out, from any place: everything it holds is given back."""
        if request.status is RequestStatus.RUNNING:
            self._stop(request)
        elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self._num_waiting_for_grammar -= 1
        elif not self.in_flight.unfollow(request):
            self.waiting.remove(request)
        samples = self._requests[request.request_id]
        del samples[request.index]
        if not samples:
            del self._requests[request.request_id]
        request.status = status
        self.fair_share.left(request)
        self.deadlines.finished(request)

    def flush_prefix_cache(self) -> int:
        """Nothing computed so far is found any more; returns how many blocks could be."""
        num_blocks = self._kv.flush_prefix_cache()
        self._requeue(self.in_flight.flush())
        return num_blocks

    def _stop(self, request: Request) -> None:
        remove_sorted(self.running, request, rank_of)
        self._kv.free(request)
        self.fair_share.stopped(request)
        self._requeue(self.in_flight.leave(request))

    def _requeue(self, followers: list[Request]) -> None:
        for request in followers:
            self.waiting.add(request)

    # ------------------------------------------------------------ proof

    def check_integrity(self) -> None:
        """Derives every invariant anew, blocks included; raises an InternalError if one is broken.

        Can be called at any time between two calls of the scheduler."""
        self._kv.check_integrity(self.running)
        live = [request for samples in self._requests.values() for request in samples.values()]
        running = [request for request in live if request.status is RequestStatus.RUNNING]
        if self.running != sorted(running, key=rank_of):
            raise InternalError("the running ones differ from the states of the requests")
        queued = [*self.waiting, *self.in_flight]
        if len(set(queued)) != len(queued) or set(queued) != {
            request for request in live if request.status in _QUEUED
        }:
            raise InternalError("the waiting ones differ from the states of the requests")
        if self.num_waiting + len(self.running) != len(live):
            raise InternalError("a request is in no place")
        if any(request.num_computed_tokens >= request.num_tokens for request in live):
            raise InternalError("a request has nothing left to compute")
        if any(request.num_planned_tokens > request.num_expected_tokens for request in live):
            raise InternalError("more is in flight than there will be")
        self.waiting.check_integrity()
        self.in_flight.check_integrity()
        self.fair_share.check_integrity(live)
        self.deadlines.check_integrity(live)
