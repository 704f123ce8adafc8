"""A request's derived state, and the rule for when it is done."""

from __future__ import annotations

import pytest

from engine_service.messages import FinishReason
from engine_service.request import FINISHED_STATUS, RequestStatus
from engine_service.stop_check import Stop, check_stop
from tests.core_fakes import make_request


def test_output_extends_the_known_tokens_and_leaves_the_prompt_alone() -> None:
    prompt = [5, 6]
    request = make_request("r", prompt, index=3)
    request.append_output(7)
    assert request.key == ("r", 3)
    assert (request.prompt_token_ids, request.output_token_ids) == ([5, 6], [7])
    assert request.token_ids == [5, 6, 7]
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (2, 1, 3)
    assert prompt == [5, 6]


def test_every_finish_reason_has_a_finished_status() -> None:
    assert set(FINISHED_STATUS) == set(FinishReason)
    finished = {status for status in RequestStatus if status.is_finished}
    assert finished == set(FINISHED_STATUS.values())


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("output", "criteria", "terminated", "expected"),
    [
        ([7], {}, False, None),
        ([2], {"eos_token_ids": (2, 3)}, False, Stop(STOP, 2)),
        ([3], {"eos_token_ids": (2, 3)}, False, Stop(STOP, 3)),
        ([9], {"stop_token_ids": (9,)}, False, Stop(STOP, 9)),
        ([2], {}, False, None),  # ignore_eos: the edge leaves eos_token_ids empty
        ([2, 7], {"eos_token_ids": (2,)}, False, None),  # only the newest token counts
        ([2], {"eos_token_ids": (2,), "min_tokens": 2}, False, None),
        ([7, 2], {"eos_token_ids": (2,), "min_tokens": 2}, False, Stop(STOP, 2)),
        ([9], {"stop_token_ids": (9,), "min_tokens": 2}, False, None),
        ([7], {"max_tokens": 1}, False, Stop(LENGTH)),
        ([7, 7], {"max_tokens": 3}, False, None),
        ([2], {"max_tokens": 1, "eos_token_ids": (2,)}, False, Stop(STOP, 2)),
        ([7], {}, True, Stop(STOP)),
        ([7], {"max_tokens": 1}, True, Stop(STOP)),
        ([7], {"min_tokens": 3}, True, Stop(STOP)),
        ([2], {"eos_token_ids": (2,)}, True, Stop(STOP, 2)),
        ([7, 7, 7, 7, 7], {"max_tokens": 99}, False, Stop(LENGTH)),  # 3 + 5 fill the context of 8
    ],
)
def test_stop_check(
    output: list[int],
    criteria: dict[str, int | tuple[int, ...]],
    terminated: bool,
    expected: Stop | None,
) -> None:
    request = make_request("r", [1, 1, 1], **{"max_tokens": 50, **criteria})  # type: ignore[arg-type]
    for token in output:
        request.append_output(token)
    assert check_stop(request, max_model_len=8, grammar_is_terminated=terminated) == expected
