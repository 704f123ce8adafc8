"""Which requests end by time. A step at which none is due costs one comparison."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Final

from engine_service.errors import InternalError
from engine_service.request import Request

_SLACK: Final = 64  # entries of finished requests that are not worth a clean-up


class Deadlines:
    """A heap by deadline. Finished requests stay in it until they are the majority, then all go:
    so adding and ending cost O(log n), and nothing is ever searched."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []  # (deadline, order of adding, request)
        self._num_added = 0
        self._num_finished = 0  # of the entries

    def add(self, request: Request) -> None:
        """One without a deadline is left out."""
        if request.deadline_ns:
            self._num_added += 1
            heapq.heappush(self._heap, (request.deadline_ns, self._num_added, request))

    def finished(self, request: Request) -> None:
        """To be called once for each that was added, when its status says so."""
        if not request.deadline_ns:
            return
        self._num_finished += 1
        if self._num_finished > _SLACK and 2 * self._num_finished > len(self._heap):
            self._heap = [entry for entry in self._heap if not entry[2].status.is_finished]
            heapq.heapify(self._heap)
            self._num_finished = 0

    def next_ns(self) -> int | None:
        """The earliest deadline of an unfinished request."""
        while self._heap and self._heap[0][2].status.is_finished:
            heapq.heappop(self._heap)
            self._num_finished -= 1
        return self._heap[0][0] if self._heap else None

    def first_due(self, now_ns: int) -> Request | None:
        """An unfinished request whose deadline has come; the caller finishes it."""
        if not self._heap or self._heap[0][0] > now_ns:
            return None
        next_ns = self.next_ns()
        return None if next_ns is None or next_ns > now_ns else self._heap[0][2]

    def check_integrity(self, live: Collection[Request]) -> None:
        entries = [request for _, _, request in self._heap]
        unfinished = {request for request in entries if not request.status.is_finished}
        if unfinished != {request for request in live if request.deadline_ns}:
            raise InternalError("a deadline is not watched")
        if len(entries) - len(unfinished) != self._num_finished:
            raise InternalError("wrong count of finished requests among the deadlines")
