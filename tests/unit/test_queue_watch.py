"""Why a watched request waits: the scheduler's reasons, each with its two stamps."""

from __future__ import annotations

import pytest

from engine_service.messages import SamplingParams, StoppingCriteria, Wait, WaitReason
from engine_service.request import Request, RequestStatus
from engine_service.wait_log import WaitLog
from tests.core_fakes import JSON_OBJECT, Core, make_request


def watched(core: Core, request: Request) -> Request:
    request.taken_ns = core.now_ns
    core.scheduler.add_request(request, is_watched=True, wants_steps=True)
    return request


def reasons(request: Request) -> list[WaitReason]:
    return [wait.reason for wait in request.timing().waits]


def check_waits_fill_the_queue(request: Request) -> None:
    """From the core's mailbox to the first step, without a gap."""
    at_ns = request.taken_ns
    for wait in request.timing().waits:
        if wait.start_ns < request.first_scheduled_ns:
            assert wait.start_ns == at_ns <= wait.end_ns
            at_ns = wait.end_ns
    assert at_ns == request.first_scheduled_ns


def test_an_idle_engine_keeps_nobody_waiting() -> None:
    core = Core()
    request = watched(core, make_request("mine"))
    core.run()
    assert reasons(request) == [WaitReason.NOT_SEEN]
    check_waits_fill_the_queue(request)


def test_a_place_is_missing() -> None:
    core = Core(max_num_seqs=1)
    core.add(make_request("other", max_tokens=6))
    core.step()
    request = watched(core, make_request("mine"))
    core.run()
    assert reasons(request) == [WaitReason.NOT_SEEN, WaitReason.NO_SLOT]
    check_waits_fill_the_queue(request)


def test_the_budget_goes_to_a_long_prompt() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=32)
    core.add(make_request("other", range(200)))
    core.step()
    request = watched(core, make_request("mine", range(500, 510)))
    core.run()
    assert reasons(request) == [WaitReason.NOT_SEEN, WaitReason.NO_BUDGET]
    check_waits_fill_the_queue(request)


def test_blocks_are_missing_also_when_the_budget_is() -> None:
    core = Core(num_blocks=30, block_size=4, max_num_batched_tokens=16)
    core.add(make_request("other", range(64), max_tokens=20))
    core.step()
    request = watched(core, make_request("mine", range(500, 560)))
    core.step()
    assert core.scheduler.stats().num_waiting == 1
    core.run()
    assert reasons(request) == [WaitReason.NOT_SEEN, WaitReason.NO_BLOCKS]
    check_waits_fill_the_queue(request)


def test_another_computes_its_prefix() -> None:
    core = Core(num_blocks=256, max_num_batched_tokens=32)
    core.add(make_request("other", range(128)))
    core.step()
    request = watched(core, make_request("mine", [*range(120), 900, 901], arrival_ns=1))
    core.run()
    assert WaitReason.PREFIX_IN_FLIGHT in reasons(request)
    check_waits_fill_the_queue(request)


def test_it_is_another_tenants_turn() -> None:
    core = Core(num_blocks=256, max_num_seqs=1)
    core.add(make_request("before", range(100), tenant="greedy", max_tokens=8))
    core.step()
    request = watched(core, make_request("mine", tenant="greedy", arrival_ns=1))
    core.add(make_request("late", range(50, 60), tenant="modest", arrival_ns=2))
    core.run()
    assert WaitReason.TURN in reasons(request)
    check_waits_fill_the_queue(request)


def test_its_grammar_compiles() -> None:
    core = Core()
    request = make_request("mine", structured_output=JSON_OBJECT)
    request.status = RequestStatus.WAITING_FOR_GRAMMAR
    watched(core, request)
    core.add(make_request("other", range(50, 60), max_tokens=6))
    core.step()
    core.step()
    core.scheduler.grammar_ready(request.key, core.now_ns)
    core.run()
    assert reasons(request) == [WaitReason.NOT_SEEN, WaitReason.GRAMMAR]
    assert request.timing().waits[1].end_ns >= request.grammar_ready_ns > 0
    check_waits_fill_the_queue(request)


def test_between_its_chunks_others_have_the_budget() -> None:
    """A tenant that has had less goes ahead of half a prompt."""
    core = Core(num_blocks=512, max_num_batched_tokens=16)
    request = watched(core, make_request("mine", range(160), tenant="a"))
    core.step()
    core.add(make_request("other", range(500, 580), tenant="b", arrival_ns=1))
    core.run()
    waits = [wait for wait in request.timing().waits if wait.start_ns > request.first_scheduled_ns]
    assert {wait.reason for wait in waits} == {WaitReason.NO_BUDGET}
    chunks = request.timing().prefill_chunks
    for wait in waits:  # in none of its own steps
        assert not any(c.start_ns < wait.end_ns and wait.start_ns < c.end_ns for c in chunks)


def test_who_is_not_watched_has_no_log_and_nobody_is_watched_after_the_first_token() -> None:
    core = Core()
    plain, mine = make_request("plain"), make_request("mine", max_tokens=5)
    core.add(plain)
    watched(core, mine)
    core.step()
    assert plain.wait_log is None and plain.timing().waits == ()
    assert mine.num_output_tokens == 1 and not core.scheduler.watch
    core.run()


@pytest.mark.parametrize("ends", ["abort", "deadline"])
def test_an_end_in_the_queue_ends_the_wait(ends: str) -> None:
    core = Core(max_num_seqs=1)
    core.add(make_request("other", max_tokens=50))
    core.step()
    deadline_ns = core.now_ns + 35 if ends == "deadline" else 0
    request = watched(core, make_request("mine", deadline_ns=deadline_ns))
    core.step()
    if ends == "abort":
        core.scheduler.abort(request.key, core.now_ns)
    else:
        core.step()
        core.step()
    assert request.status.is_finished and not core.scheduler.watch
    waits = request.timing().waits
    assert waits[-1].reason is WaitReason.NO_SLOT
    assert waits[-1].end_ns == request.finished_ns


def test_a_log_keeps_changes_only() -> None:
    log = WaitLog(10)
    for now_ns in range(20, 60, 10):
        log.note(WaitReason.NO_SLOT, now_ns)
    log.note(None, 60)
    assert log.waits(99) == (
        Wait(WaitReason.NOT_SEEN, 10, 20),
        Wait(WaitReason.NO_SLOT, 20, 60),
    )


def test_of_a_long_wait_ever_fewer_steps_are_wanted() -> None:
    core = Core(num_blocks=2_000, max_num_seqs=1)
    sampling, stopping = SamplingParams(), StoppingCriteria(max_tokens=2_000)
    core.add(Request("other", 0, [1, 2], sampling, stopping))
    core.step()
    watched(core, make_request("mine"))
    wanted = 0
    for _ in range(300):
        core.step()
        wanted += core.scheduler.watch.take_step_is_wanted()
    assert 31 <= wanted <= 31 + 16 * 4
