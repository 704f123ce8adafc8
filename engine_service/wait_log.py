"""Why a request computed nothing, from its arrival in the core to its first token.

    log   | not seen | no blocks      | turn of others |  (runs)  | no budget |  (runs)
          taken      schedule()       schedule()       share      no share    share

Only the change of a reason is noted, so that a wait of any length costs two stamps.
"""

from __future__ import annotations

from engine_service.messages import Wait, WaitReason


class WaitLog:
    """Of one request."""

    __slots__ = ("_reason", "_since_ns", "_waits", "num_steps", "wants_steps")

    def __init__(self, now_ns: int, *, wants_steps: bool = False) -> None:
        """`wants_steps`: those that it waits for, or is computed in, are to be recorded."""
        self.wants_steps = wants_steps
        self._reason: WaitReason | None = WaitReason.NOT_SEEN
        self._since_ns = now_ns
        self._waits: list[Wait] = []
        self.num_steps = 0  # in which it had no share

    def note(self, reason: WaitReason | None, now_ns: int) -> None:
        """None: it has a share of the step."""
        if reason is not self._reason:
            self._waits += self._current(now_ns)
            self._reason, self._since_ns = reason, now_ns

    def waits(self, now_ns: int) -> tuple[Wait, ...]:
        """Up to now, in order."""
        return (*self._waits, *self._current(now_ns))

    def _current(self, now_ns: int) -> tuple[Wait, ...]:
        return () if self._reason is None else (Wait(self._reason, self._since_ns, now_ns),)
