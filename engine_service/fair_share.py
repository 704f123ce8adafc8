"""What each tenant has had, so that the next turn goes to the one that has had least.

    charged(tenant) = scheduled tokens / weight        prompt and output tokens alike

Whoever has the smallest charge among those with work to admit goes next. Over a long contention
each gets tokens in proportion to its weight: this is deficit round robin with the smallest
quantum, and the deficit is paid after the fact, for nobody knows beforehand how long an output is.

    charge   A ##########            who comes to wait starts level with the least of those
             B #######|              that wait (or of those that are here, if none does): what
             C -------| <- comes     was not used in the past is not saved up

Nor is what was had at nobody's cost a debt: a step is charged only if two tenants or more wanted
more of it than they got. And a debt does not end with a tenant's last request, but when those
that are here have had as much.

**Seats.** Tokens decide who is admitted next; whether anybody can be, depends on the places that
running requests leave, be it for lack of seats (`max_num_seqs`) or of blocks. A tenant below its
share of those places may claim one from another that is above its own and has had no less. Everyone
with a request has a claim to one. A claim never leaves the other below its share nor before the
claimant in turn, so that no two tenants take places from each other in turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from engine_service.errors import InternalError, InvalidRequest
from engine_service.request import Request, RequestStatus

_MAX_DEBTS: Final = 256  # of tenants without requests that are remembered


@dataclass(slots=True, eq=False)
class _Tenant:
    """One with unfinished requests."""

    weight: float
    charged: float = 0.0  # tokens / weight
    settled: float = 0.0  # its charge before the step in the making
    num_requests: int = 0  # unfinished
    num_running: int = 0

    @property
    def waits(self) -> bool:
        return self.num_requests > self.num_running


class FairShare:
    def __init__(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight > 0):
                raise InvalidRequest(f"{name!r} must weigh more than 0", field="tenant_weights")
        self._weights = dict(weights)
        self._tenants: dict[str, _Tenant] = {}
        self._num_running = 0  # of all tenants
        self._debts: dict[str, float] = {}  # charges of tenants without requests

    # ------------------------------------------------------------ requests come and go

    def joined(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant)
        is_new = tenant is None
        if tenant is None:
            debt = self._debts.pop(request.tenant, 0.0)
            tenant = _Tenant(self._weights.get(request.tenant, 1.0), charged=debt)
        if not tenant.waits:
            here = self._tenants.values()
            waiting = [other.charged for other in here if other.waits]
            level = min(waiting or [other.charged for other in here], default=0.0)
            tenant.charged = tenant.settled = max(tenant.charged, level)
        if is_new:
            self._tenants[request.tenant] = tenant
        tenant.num_requests += 1

    def started(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_running += 1
        self._num_running += 1

    def stopped(self, request: Request) -> None:
        """It runs no more: preempted, or at its end."""
        self._tenants[request.tenant].num_running -= 1
        self._num_running -= 1

    def left(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.num_requests -= 1
        if tenant.num_requests == 0:
            del self._tenants[request.tenant]
            self._debts[request.tenant] = tenant.charged
            self._forget_debts()

    def _forget_debts(self) -> None:
        """Those that joining would raise at least as high anyway, and the smallest of too many."""
        least = min((tenant.charged for tenant in self._tenants.values()), default=math.inf)
        self._debts = {name: debt for name, debt in self._debts.items() if debt > least}
        if len(self._debts) > _MAX_DEBTS:
            del self._debts[min(self._debts, key=self._debts.__getitem__)]

    # ------------------------------------------------------------ tokens

    def charge(self, request: Request, num_tokens: int) -> None:
        tenant = self._tenants[request.tenant]
        tenant.charged += num_tokens / tenant.weight

    def settle(self, cut_short: Collection[str]) -> None:
        """Ends a step, in which running requests of the tenants `cut_short` could have had more."""
        waiting = {name for name, tenant in self._tenants.items() if tenant.waits}
        if len(waiting.union(cut_short)) > 1:
            for tenant in self._tenants.values():
                tenant.settled = tenant.charged
        else:  # what each had was at nobody's cost
            for tenant in self._tenants.values():
                tenant.charged = tenant.settled

    def turn(self, request: Request) -> tuple[float, float]:
        """What its tenant has had, and has running; the smallest goes first."""
        tenant = self._tenants[request.tenant]
        return tenant.charged, tenant.num_running / tenant.weight

    # ------------------------------------------------------------ seats

    def has_claim(self, request: Request) -> bool:
        """Whether its tenant is below its share of the running requests."""
        tenant = self._tenants[request.tenant]
        return (
            tenant.num_running == 0
            or tenant.num_running + 1 <= tenant.weight * self._running_per_weight()
        )

    def holders_above_share(self) -> Iterator[str]:
        """Tenants that have to give up a place to who has a claim."""
        running_per_weight = self._running_per_weight()
        for name, tenant in self._tenants.items():
            if tenant.num_running > max(1.0, tenant.weight * running_per_weight):
                yield name

    def places_for(self, request: Request) -> Counter[str]:
        """How many places other tenants hold above their share, of those that have had no less."""
        charged = self._tenants[request.tenant].charged
        running_per_weight = self._running_per_weight()
        places: Counter[str] = Counter()
        for name in self.holders_above_share():
            tenant = self._tenants[name]
            if tenant.charged >= charged:
                share = max(1.0, tenant.weight * running_per_weight)
                places[name] = math.ceil(tenant.num_running - share)
        return places

    def _running_per_weight(self) -> float:
        return self._num_running / sum(tenant.weight for tenant in self._tenants.values())

    # ------------------------------------------------------------ proof

    def check_integrity(self, live: Collection[Request]) -> None:
        num_requests = Counter(request.tenant for request in live)
        num_running = Counter(r.tenant for r in live if r.status is RequestStatus.RUNNING)
        if {name: t.num_requests for name, t in self._tenants.items()} != num_requests:
            raise InternalError("a tenant has another number of requests")
        if any(t.num_running != num_running[name] for name, t in self._tenants.items()):
            raise InternalError("a tenant has another number of running requests")
        if self._num_running != num_running.total():
            raise InternalError("wrong count of running requests")
        if self._debts.keys() & self._tenants.keys() or len(self._debts) > _MAX_DEBTS:
            raise InternalError("a debt is remembered of a tenant that is here, or too many are")
        if any(tenant.charged != tenant.settled for tenant in self._tenants.values()):
            raise InternalError("a step is not settled")
