"""The engine core's mailbox: any thread puts commands in, the step loop takes them out.

    actor --Add, Abort, Add, Abort--> [ mailbox ] --> step loop

Order is kept. `take_aborts` may overtake: it serves a running step, where nothing but an abort
matters, and leaves an abort behind whose AddRequest still waits in front of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from engine_service.messages import AbortRequest, AddRequest, Command


class Mailbox:
    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._commands: list[Command] = []
        self._woken = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """The other side is gone; nothing more will come."""
        return self._closed

    def put(self, commands: Iterable[Command]) -> None:
        with self._condition:
            self._commands.extend(commands)
            self._condition.notify()

    def wake(self) -> None:
        """Ends a `wait` though no command came (a grammar is ready)."""
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify()

    def wait(self, timeout_seconds: float) -> bool:
        """Blocks until there is something to do; False when the timeout passed first."""
        deadline = time.monotonic() + timeout_seconds
        with self._condition:
            while not (self._commands or self._woken or self._closed):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return False
                self._condition.wait(remaining)
            self._woken = False
            return True

    def drain(self) -> list[Command]:
        with self._condition:
            commands, self._commands = self._commands, []
            return commands

    def take_aborts(self) -> list[AbortRequest]:
        if not self._commands:  # the common case, without the lock
            return []
        aborts: list[AbortRequest] = []
        kept: list[Command] = []
        added: set[str] = set()
        with self._condition:
            for command in self._commands:
                if isinstance(command, AbortRequest) and command.request_id not in added:
                    aborts.append(command)
                    continue
                if isinstance(command, AddRequest):
                    added.add(command.request_id)
                kept.append(command)
            self._commands = kept
        return aborts
