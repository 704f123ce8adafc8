"""What a step's result says of one request: whether its token counts, and the message about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine_service.errors import EngineError, InternalError
from engine_service.messages import (
    Failure,
    Finish,
    RequestOutput,
    RequestTiming,
    TokenLogprobs,
)
from engine_service.request import Request, RequestKey
from engine_service.scheduler_output import ModelRunnerOutput


class Grammars(Protocol):
    """What the scheduler needs of the grammars; asked only about requests that have one."""

    def accept(self, key: RequestKey, token_id: int) -> None:
        """Advances the request's matcher; an EngineError fails that request."""

    def take_forced_token(self, key: RequestKey) -> int | None:
        """Advances the matcher by the only token that may come next; None: there is a choice."""

    def is_terminated(self, key: RequestKey) -> bool: ...

    def release(self, key: RequestKey) -> None:
        """The request has ended in `update_from_output`. (Who aborts or fails it, releases it.)"""


def accept_token(
    request: Request, runner_output: ModelRunnerOutput, grammars: Grammars
) -> Failure | None:
    """Shows the sampled token to the request's grammar; what is wrong with it, if anything."""
    token_id = runner_output.sampled_token_ids.get(request.key)
    if token_id is None:
        return Failure(InternalError.reason, "the step yielded no token for this request")
    if request.structured_output is not None:
        try:
            grammars.accept(request.key, token_id)
        except EngineError as error:
            return Failure(error.reason, error.message, error.field)
    return None


def output_of(
    request: Request,
    num_prefilled: int | None = None,
    token_ids: Sequence[int] = (),
    logprobs: TokenLogprobs | None = None,
    finish: Finish | None = None,
    prompt_logprobs: Sequence[TokenLogprobs] = (),
    timing: RequestTiming | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        index=request.index,
        new_token_ids=list(token_ids),
        new_logprobs=[] if logprobs is None else [logprobs],
        num_prefilled_tokens=num_prefilled,
        num_cached_tokens=request.num_cached_tokens,
        finish=finish,
        new_prompt_logprobs=list(prompt_logprobs),
        timing=timing,
    )
