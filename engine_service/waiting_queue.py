"""Requests that wait to be admitted, and which of them is next.

    by tenant    A: r1 r4 r9 ...      each in the order of place, so that one tenant's flood
                 B: r7                stands behind its own first, never before others' first
                      ^ heads         next: the head whose tenant has had least for its weight

**Rank.** `due = arrival + priority * aging`: one unit of priority is worth `aging` of waiting.
**Place.** `due + PATIENCE * prefill`, the time that its prompt takes alone: short prompts overtake
long ones, which wait longer for it by no more than in proportion to their own length.

Both are fixed once, and who has waited long enough is overtaken by nobody: there is no starvation
and nothing to age step by step.

Priority counts between tenants as well: only heads that are as urgent as the most urgent request,
or have waited long enough to be its equal, take part in the choice.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

from engine_service.errors import InternalError
from engine_service.fair_share import FairShare
from engine_service.request import Request

PATIENCE: Final = 4  # times its own prefill, for which a prompt may be overtaken by shorter ones


def rank_of(request: Request) -> tuple[int, int]:
    return request.rank


def place_of(request: Request) -> tuple[int, int]:
    return request.place


def remove_sorted(
    requests: list[Request], request: Request, key: Callable[[Request], tuple[int, int]]
) -> None:
    del requests[bisect_left(requests, key(request), key=key)]


class WaitingQueue:
    def __init__(self, fair_share: FairShare, aging_ns: int) -> None:
        self._fair_share = fair_share
        self._aging_ns = aging_ns
        self._by_tenant: dict[str, list[Request]] = {}  # never empty, each by place
        self._priorities: Counter[int] = Counter()  # never 0

    def __len__(self) -> int:
        return self._priorities.total()

    def __bool__(self) -> bool:
        return bool(self._by_tenant)

    def __iter__(self) -> Iterator[Request]:
        for requests in self._by_tenant.values():
            yield from requests

    def due_ns(self, request: Request) -> int:
        """The first part of its rank."""
        return request.arrival_ns + request.priority * self._aging_ns

    def add(self, request: Request) -> None:
        insort(self._by_tenant.setdefault(request.tenant, []), request, key=place_of)
        self._priorities[request.priority] += 1

    def remove(self, request: Request) -> None:
        requests = self._by_tenant[request.tenant]
        remove_sorted(requests, request, place_of)
        if not requests:
            del self._by_tenant[request.tenant]
        self._priorities[request.priority] -= 1
        if not self._priorities[request.priority]:
            del self._priorities[request.priority]

    def head(self, now_ns: int) -> Request | None:
        """Whose turn it is. One look at each tenant that waits."""
        if not self._by_tenant:
            return None
        latest_ns = now_ns + min(self._priorities) * self._aging_ns
        turn = self._fair_share.turn
        heads = (requests[0] for requests in self._by_tenant.values())
        return min(heads, key=lambda r: (r.rank[0] > latest_ns, turn(r), r.place))

    def check_integrity(self) -> None:
        for tenant, requests in self._by_tenant.items():
            if not requests or requests != sorted(requests, key=place_of):
                raise InternalError("a tenant's queue is not in order")
            if any(request.tenant != tenant for request in requests):
                raise InternalError("a request waits with another tenant")
        if dict(self._priorities) != dict(Counter(request.priority for request in self)):
            raise InternalError("wrong counts of waiting requests by priority")
