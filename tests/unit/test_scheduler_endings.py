"""Aborts, failures and grammars: each ends one request, at any moment, and leaves no trace."""

from __future__ import annotations

import pytest

from engine_service.errors import InternalError
from engine_service.messages import Failure, FinishReason, RequestOutput
from engine_service.request import RequestStatus
from engine_service.scheduler_output import ModelRunnerOutput
from tests.core_fakes import JSON_OBJECT, Core, expected_tokens, make_request, shares

FAILURE = Failure("INVALID_VALUE", "bad schema", "structured_output.json_schema")


def reason(output: RequestOutput | None) -> FinishReason | None:
    return None if output is None or output.finish is None else output.finish.reason


def assert_empty(core: Core) -> None:
    core.scheduler.check_integrity()
    stats = core.scheduler.stats()
    assert not core.scheduler.has_unfinished_requests()
    assert not core.has_work()
    assert (stats.num_running, stats.num_waiting, stats.used_blocks) == (0, 0, 0)


# ---------------------------------------------------------------- abort


def test_abort_frees_the_blocks_at_once() -> None:
    core = Core()
    core.add(make_request("r", range(9), max_tokens=50))
    core.step()
    output = core.scheduler.abort(("r", 0), now_ns=77)
    assert reason(output) is FinishReason.ABORT
    assert output is not None
    assert output.finish is not None
    assert output.finish.timing.finished_ns == 77
    assert_empty(core)


def test_abort_of_a_waiting_request() -> None:
    core = Core(max_num_seqs=1)
    core.add(*(make_request(request_id, arrival_ns=i) for i, request_id in enumerate("abc")))
    core.step()
    output = core.scheduler.abort(("b", 0), core.now_ns)
    assert output is not None
    assert output.finish is not None
    assert output.finish.timing.first_scheduled_ns == 0
    core.run()
    assert set(core.finished) == {("a", 0), ("c", 0)}


def test_abort_of_a_preempted_request() -> None:
    core = Core(num_blocks=5)
    core.add(make_request("a", range(6), max_tokens=9, arrival_ns=1))
    core.add(second := make_request("b", range(20, 26), max_tokens=9, arrival_ns=2))
    while second.status is not RequestStatus.PREEMPTED:
        core.step()
    assert reason(core.scheduler.abort(("b", 0), core.now_ns)) is FinishReason.ABORT
    core.run()
    assert_empty(core)


def test_abort_of_the_unknown_and_of_the_finished_is_none() -> None:
    core = Core()
    core.add(make_request("r", max_tokens=1))
    core.run()
    assert core.scheduler.abort(("r", 0), 1) is None
    assert core.scheduler.abort(("r", 7), 1) is None
    assert core.scheduler.abort(("nobody", 0), 1) is None
    assert core.scheduler.keys_of("nobody") == []


def test_a_request_aborted_while_its_step_runs_says_no_more() -> None:
    core = Core()
    kept = make_request("kept", range(9), max_tokens=3)
    core.add(make_request("gone", range(20, 29)), kept)
    scheduler_output = core.schedule()
    core.scheduler.abort(("gone", 0), core.now_ns)
    outputs = core.update(scheduler_output)
    assert [output.request_id for output in outputs] == ["kept"]
    core.run()
    assert core.tokens == {("kept", 0): expected_tokens(kept)}
    # what it computed may be garbage by then, so it must not be found
    assert core.kv.get_computed_blocks(make_request("x", range(20, 29)))[1] == 0
    assert_empty(core)


def test_its_id_can_be_used_again_while_that_step_runs() -> None:
    core = Core()
    core.add(make_request("r", range(9)))
    scheduler_output = core.schedule()
    core.scheduler.abort(("r", 0), core.now_ns)
    again = make_request("r", range(30, 39), max_tokens=2)
    core.add(again)
    assert core.update(scheduler_output) == []
    core.run()
    assert core.tokens == {("r", 0): expected_tokens(again)}


# ---------------------------------------------------------------- failures


def test_a_failing_request_disturbs_no_neighbour() -> None:
    core = Core()
    kept = make_request("kept", range(9), max_tokens=3)
    core.add(make_request("bad", range(20, 29)), kept)
    outputs = core.update(core.schedule(), failing=[("bad", 0)])
    assert [reason(output) for output in outputs] == [FinishReason.ERROR, None]
    assert outputs[0].finish is not None
    assert outputs[0].finish.failure == Failure("INTERNAL_ERROR", "NaN logits")
    assert outputs[0].new_token_ids == []
    core.run()
    assert core.tokens["kept", 0] == expected_tokens(kept)
    assert_empty(core)


def test_what_a_failed_step_computed_is_not_reused() -> None:
    core = Core()
    core.add(make_request("bad", range(20, 29)))
    core.update(core.schedule(), failing=[("bad", 0)])
    assert core.kv.get_computed_blocks(make_request("x", range(20, 29)))[1] == 0


def test_a_request_can_fail_in_a_chunk_that_yields_no_token() -> None:
    core = Core(max_num_batched_tokens=4)
    core.add(make_request("bad", range(9)))
    outputs = core.update(core.schedule(), failing=[("bad", 0)])
    assert [reason(output) for output in outputs] == [FinishReason.ERROR]
    assert_empty(core)


def test_a_step_that_yields_no_token_fails_the_request_in_place_of_hanging() -> None:
    core = Core()
    core.add(make_request("r"))
    scheduler_output = core.schedule()
    core.scheduler.launched(scheduler_output)
    outputs = core.scheduler.update_from_output(
        scheduler_output, ModelRunnerOutput({}), 0, 1, core.grammars
    )
    assert [reason(output) for output in outputs] == [FinishReason.ERROR]
    assert_empty(core)


def test_fail_names_the_failure() -> None:
    core = Core()
    core.add(make_request("r"))
    output = core.scheduler.fail(("r", 0), FAILURE, 5)
    assert output is not None
    assert output.finish is not None
    assert (output.finish.reason, output.finish.failure) == (FinishReason.ERROR, FAILURE)
    assert core.scheduler.fail(("r", 0), FAILURE, 6) is None
    assert_empty(core)


# ---------------------------------------------------------------- grammars


def waiting_for_grammar(core: Core, request_id: str = "g", max_tokens: int = 9) -> None:
    request = make_request(request_id, max_tokens=max_tokens, structured_output=JSON_OBJECT)
    request.status = RequestStatus.WAITING_FOR_GRAMMAR
    core.add(request)


def test_a_request_waits_for_its_grammar_and_stalls_nobody() -> None:
    core = Core(grammar_length=3)
    waiting_for_grammar(core)
    assert not core.has_work()
    assert core.scheduler.has_unfinished_requests()
    core.add(make_request("plain", [7, 7], max_tokens=2))
    assert shares(core.schedule()) == {"plain": 2}
    assert core.scheduler.stats().num_waiting == 1
    core.scheduler.grammar_ready(("g", 0), now_ns=42)
    assert core.has_work()
    core.run()
    finish = core.finished["g", 0].finish
    assert finish is not None
    assert finish.timing.grammar_ready_ns == 42


def test_a_complete_grammar_ends_the_request_and_is_released_once() -> None:
    core = Core(grammar_length=3)
    core.add(request := make_request("g", max_tokens=9, structured_output=JSON_OBJECT))
    core.run()
    assert reason(core.finished["g", 0]) is FinishReason.STOP
    assert core.tokens["g", 0] == expected_tokens(request, grammar_length=3)
    assert core.grammars.accepted["g", 0] == core.tokens["g", 0]
    assert core.grammars.released == [("g", 0)]


def test_grammars_hear_nothing_of_requests_without_one() -> None:
    core = Core(grammar_length=1)
    core.add(make_request("r", max_tokens=5))
    core.run()
    assert (core.grammars.accepted, core.grammars.released) == ({}, [])


def test_a_token_that_the_grammar_refuses_fails_the_request() -> None:
    core = Core()
    core.grammars.refusing.add(("g", 0))
    core.add(make_request("g", structured_output=JSON_OBJECT), make_request("kept", max_tokens=1))
    outputs = core.step()
    assert [reason(output) for output in outputs] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert outputs[0].new_token_ids == []
    assert core.grammars.released == [("g", 0)]
    assert_empty(core)


def test_grammar_news_about_a_request_that_is_gone_is_ignored() -> None:
    core = Core()
    waiting_for_grammar(core)
    assert reason(core.scheduler.abort(("g", 0), 1)) is FinishReason.ABORT
    core.scheduler.grammar_ready(("g", 0), 2)
    assert core.scheduler.fail(("g", 0), FAILURE, 3) is None
    assert_empty(core)


def test_grammar_ready_twice_is_once() -> None:
    core = Core()
    waiting_for_grammar(core, max_tokens=2)
    core.scheduler.grammar_ready(("g", 0), 1)
    core.scheduler.grammar_ready(("g", 0), 2)
    core.run()
    assert len(core.tokens["g", 0]) == 2
    assert_empty(core)


# ---------------------------------------------------------------- proof


def test_a_lost_request_is_found() -> None:
    core = Core()
    core.add(request := make_request("r"))
    request.status = RequestStatus.PREEMPTED
    core.scheduler.check_integrity()
    request.status = RequestStatus.RUNNING
    with pytest.raises(InternalError):
        core.scheduler.check_integrity()
