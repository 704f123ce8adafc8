"""What the proof of the scheduler's books finds: each kind of damage, and only that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_service.errors import InternalError
from engine_service.request import Request, RequestStatus
from engine_service.request_queues import RequestQueues
from tests.core_fakes import Core, make_request


def busy() -> tuple[Core, dict[str, Request]]:
    """A leader with a follower, a tenant's running and waiting request, and a deadline."""
    core = Core(num_blocks=64, max_num_seqs=3, long_prefill_token_threshold=8)
    requests = {
        "leader": make_request("leader", range(40), arrival_ns=1),
        "follower": make_request("follower", range(40), arrival_ns=2, deadline_ns=10_000),
        "running": make_request("running", range(50, 58), max_tokens=20, tenant="t", arrival_ns=0),
        "third": make_request("third", [60, 61], max_tokens=20, tenant="t", arrival_ns=3),
        "waiting": make_request("waiting", [70, 71], tenant="t", arrival_ns=4),
    }
    core.add(*requests.values())
    core.step()
    return core, requests


def test_the_books_of_a_busy_scheduler_are_true() -> None:
    core, requests = busy()
    queues = core.scheduler._queues
    assert [r.request_id for r in queues.running] == ["running", "leader", "third"]
    assert list(queues.in_flight) == [requests["follower"]]
    assert list(queues.waiting) == [requests["waiting"]]
    core.run()
    assert set(core.finished) == {request.key for request in requests.values()}


Damage = Callable[[RequestQueues, dict[str, Request]], object]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda q, r: q.running.reverse(), id="order of the running"),
        pytest.param(lambda q, r: q.waiting.remove(r["waiting"]), id="lost from the queue"),
        pytest.param(lambda q, r: q.waiting.add(r["follower"]), id="in two places"),
        pytest.param(lambda q, r: q.in_flight.unfollow(r["follower"]), id="lost follower"),
        pytest.param(lambda q, r: q.in_flight.leave(r["leader"]), id="followers forgotten"),
        pytest.param(lambda q, r: q.in_flight._leaders.clear(), id="leader not found"),
        pytest.param(
            lambda q, r: q.in_flight._following.update({r["follower"]: r["running"]}),
            id="another leader",
        ),
        pytest.param(lambda q, r: q.waiting._priorities.clear(), id="counts by priority"),
        pytest.param(lambda q, r: setattr(r["waiting"], "tenant", "u"), id="another tenant"),
        pytest.param(lambda q, r: q.fair_share.left(r["waiting"]), id="requests of a tenant"),
        pytest.param(lambda q, r: q.fair_share.stopped(r["running"]), id="running of a tenant"),
        pytest.param(lambda q, r: q.deadlines.finished(r["follower"]), id="finished deadlines"),
        pytest.param(lambda q, r: q.deadlines._heap.clear(), id="deadline not watched"),
        pytest.param(
            lambda q, r: setattr(r["waiting"], "status", RequestStatus.RUNNING), id="status"
        ),
    ],
)
def test_damage_is_found(damage: Damage) -> None:
    core, requests = busy()
    core.scheduler.check_integrity()
    damage(core.scheduler._queues, requests)
    with pytest.raises(InternalError):
        core.scheduler.check_integrity()
