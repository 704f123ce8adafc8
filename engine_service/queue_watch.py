"""The requests whose way to their first token is traced, and why each of them has to wait.

The scheduler says at the end of each `schedule` why nobody else got a share. Nothing is watched:
nothing is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from engine_service.messages import WaitReason
from engine_service.request import Request, RequestKey, RequestStatus
from engine_service.scheduler_output import ScheduledRequest
from engine_service.wait_log import WaitLog

_NOTED_BITS: Final = 5  # of every doubling of a wait's steps, 16 are recorded


class QueueWatch:
    """The traced requests that have no token yet."""

    def __init__(self, is_following: Callable[[Request], bool]) -> None:
        """`is_following`: whether it waits for a prefix that another request computes."""
        self._is_following = is_following
        self._requests: dict[RequestKey, Request] = {}
        self._step_is_wanted = False

    def __bool__(self) -> bool:
        return bool(self._requests)

    def take_step_is_wanted(self) -> bool:
        """Whether the step that was noted last is to be recorded; asked once for each step."""
        wanted, self._step_is_wanted = self._step_is_wanted, False
        return wanted

    def waiting(self, shares: Sequence[ScheduledRequest]) -> list[RequestKey]:
        """Those that want steps and have no share of this one, but for whose grammar compiles."""
        served = {share.request.key for share in shares}
        return [
            key
            for key, request in self._requests.items()
            if key not in served
            and request.status is not RequestStatus.WAITING_FOR_GRAMMAR
            and request.wait_log is not None
            and request.wait_log.wants_steps
        ]

    def add(self, request: Request, now_ns: int, *, wants_steps: bool) -> None:
        request.wait_log = WaitLog(now_ns, wants_steps=wants_steps)
        self._requests[request.key] = request

    def drop(self, request: Request) -> None:
        """It has its first token, or is at its end; one that is not watched is no error."""
        self._requests.pop(request.key, None)

    def note(
        self,
        now_ns: int,
        shares: Sequence[ScheduledRequest],
        refusal: WaitReason,
        head: Request | None,
    ) -> None:
        """A step is scheduled. `refusal`: why the next of the queue, `head`, is not in it."""
        served = {share.request.key for share in shares}
        for key, request in self._requests.items():
            log = request.wait_log
            if log is None:
                continue
            if key in served:
                log.note(None, now_ns)
                self._step_is_wanted |= log.wants_steps
                continue
            reason = self._reason(request, refusal, head)
            log.note(reason, now_ns)
            if shares and log.wants_steps and reason is not WaitReason.GRAMMAR:
                log.num_steps += 1
                self._step_is_wanted |= _is_noted(log.num_steps)

    def _reason(self, request: Request, refusal: WaitReason, head: Request | None) -> WaitReason:
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            return WaitReason.GRAMMAR
        if request.status is RequestStatus.RUNNING:  # half of its prompt is computed
            return WaitReason.NO_BUDGET
        if self._is_following(request):
            return WaitReason.PREFIX_IN_FLIGHT
        if head is not None and head.tenant != request.tenant and request.rank < head.rank:
            return WaitReason.TURN
        if refusal is WaitReason.PREFIX_IN_FLIGHT and request is not head:
            return WaitReason.NO_BUDGET  # that is the head's own reason
        return refusal


def _is_noted(number: int) -> bool:
    """The first 31 steps of a wait, then ever fewer: they are much alike."""
    dropped = max(number.bit_length() - _NOTED_BITS, 0)
    return number >> dropped << dropped == number
