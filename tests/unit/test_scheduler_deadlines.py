"""What is past its deadline ends there: in the queue at no cost, running before its next step."""

from __future__ import annotations

from engine_service.deadlines import Deadlines
from engine_service.messages import FinishReason
from engine_service.request import RequestStatus
from tests.core_fakes import JSON_OBJECT, Core, make_request, shares


def ended_by_deadline(core: Core, request_id: str) -> bool:
    finish = core.finished[request_id, 0].finish
    assert finish is not None
    if finish.failure is None:
        return False
    assert finish.reason is FinishReason.ERROR
    return finish.failure.reason == "DEADLINE_EXCEEDED"


def test_a_deadline_in_the_queue_costs_no_prefill() -> None:
    core = Core(max_num_seqs=1)
    core.add(make_request("running", max_tokens=9, arrival_ns=1))
    core.add(make_request("late", range(20), arrival_ns=2, deadline_ns=50))
    core.run()
    assert ended_by_deadline(core, "late")
    assert not ended_by_deadline(core, "running")
    finish = core.finished["late", 0].finish
    assert finish is not None
    assert (finish.timing.first_scheduled_ns, finish.timing.finished_ns) == (0, 50)
    assert core.scheduler.stats().num_prompt_tokens == 3


def test_a_running_request_ends_before_its_next_step() -> None:
    core = Core()
    core.add(make_request("r", range(9), max_tokens=50, deadline_ns=60))
    core.add(make_request("other", max_tokens=9))
    core.step()  # schedules at 10, then at 30 and 50
    core.step()
    core.step()
    assert shares(core.schedule()) == {"other": 1}
    assert ended_by_deadline(core, "r")
    assert len(core.tokens["r", 0]) == 3
    assert core.scheduler.stats().used_blocks == 2


def test_what_finishes_in_time_is_not_touched() -> None:
    core = Core()
    core.add(make_request("r", max_tokens=3, deadline_ns=1000))
    core.run()
    assert core.scheduler.next_deadline_ns() is None
    assert core.scheduler.expire(2000) == []
    assert not ended_by_deadline(core, "r")


def test_a_deadline_is_known_while_a_grammar_compiles() -> None:
    core = Core()
    request = make_request("r", structured_output=JSON_OBJECT, deadline_ns=500)
    request.status = RequestStatus.WAITING_FOR_GRAMMAR
    core.add(request)
    assert not core.has_work()
    assert core.scheduler.next_deadline_ns() == 500
    (output,) = core.scheduler.expire(500)
    assert output.request_id == "r"
    core.scheduler.check_integrity()


def test_a_preempted_request_keeps_its_deadline() -> None:
    core = Core(num_blocks=5)
    core.add(make_request("a", range(6), max_tokens=9, arrival_ns=1))
    second = make_request("b", range(20, 26), max_tokens=9, arrival_ns=2, deadline_ns=10_000)
    core.add(second)
    while second.status is not RequestStatus.PREEMPTED:
        core.step()
    core.now_ns = 10_000
    core.schedule()
    assert ended_by_deadline(core, "b")
    assert second.output_token_ids == core.tokens["b", 0]


def test_finished_requests_do_not_pile_up_among_the_deadlines() -> None:
    deadlines = Deadlines()
    live = []
    for i in range(1000):
        request = make_request(f"r{i}", deadline_ns=10_000 - i)
        deadlines.add(request)
        if i % 10:
            request.status = RequestStatus.FINISHED_STOP
            deadlines.finished(request)
        else:
            live.append(request)
        deadlines.check_integrity(live)
        assert len(deadlines._heap) <= 2 * len(live) + 2 * 64
    assert deadlines.next_ns() == live[-1].deadline_ns
    due = deadlines.first_due(10_000)
    assert due is live[-1]
    assert deadlines.first_due(live[-1].deadline_ns - 1) is None
