"""Whether a request is done after its newest token: a pure function of what it has."""

from __future__ import annotations

from dataclasses import dataclass

from engine_service.messages import FinishReason
from engine_service.request import Request


@dataclass(frozen=True, slots=True)
class Stop:
    reason: FinishReason
    stop_token_id: int | None = None  # the end token, which stays part of the output


def check_stop(request: Request, max_model_len: int, grammar_is_terminated: bool) -> Stop | None:
    """None: it goes on. What ends it by its meaning comes before what cuts it."""
    stopping = request.stopping
    token_id = request.output_token_ids[-1]
    if request.num_output_tokens >= stopping.min_tokens and (
        token_id in stopping.eos_token_ids or token_id in stopping.stop_token_ids
    ):
        return Stop(FinishReason.STOP, stop_token_id=token_id)
    if grammar_is_terminated:  # nothing can follow, whatever min_tokens says
        return Stop(FinishReason.STOP)
    if request.num_output_tokens >= stopping.max_tokens or request.num_tokens >= max_model_len:
        return Stop(FinishReason.LENGTH)
    return None


def will_be_cut(request: Request, max_model_len: int) -> bool:
    """By what the steps under way yield, whatever that is."""
    return request.num_pending_outputs > 0 and (
        request.num_expected_outputs >= request.stopping.max_tokens
        or request.num_expected_tokens >= max_model_len
    )
