"""How many connections may be open, and which of them goes for another.

    waits for a request   the first one, or the next: it is closed for a new connection where there
                          is no room, the longest waiting first
    has a request         it stays, until its answer ends

Where all have one, a new connection is over the limit: it gets an answer to its first request, 503
unless that is a probe, and is closed. Of those there are few, and what comes beyond them is closed
unheard.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from aiohttp import web
from prometheus_client import Gauge

_MAX_OVER_LIMIT = 64
_MIN_WAIT_SECONDS = 1.0  # so long a new one may take to send its request
_QUIET_SECONDS = 60.0  # between two lines in the log

logger = logging.getLogger(__name__)


class Connection(Protocol):
    def force_close(self) -> None: ...


class Connections:
    def __init__(self, max_connections: int, within: Gauge) -> None:
        """`within` shows how many of the limit are open."""
        self._max_connections = max_connections
        self._shown = within
        self._within: set[Connection] = set()
        self._over: set[Connection] = set()
        self._waiting: dict[Connection, float] = {}  # of those within, since when; in that order
        self._warned_at = -_QUIET_SECONDS

    def opened(self, connection: Connection) -> bool:
        """Whether it is within the limit; otherwise only its first request may be answered, and it
        may be closed already."""
        if len(self._within) >= self._max_connections:
            self._close_longest_waiting()
        if len(self._within) < self._max_connections:
            self._within.add(connection)
            self._shown.set(len(self._within))
            self.waits(connection)
            return True
        self._warn()
        if len(self._over) < _MAX_OVER_LIMIT:
            self._over.add(connection)
        else:
            connection.force_close()
        return False

    def waits(self, connection: Connection) -> None:
        """For its next request."""
        if connection in self._within:
            self._waiting[connection] = time.monotonic()

    def is_asked(self, connection: Connection) -> None:
        """The head of a request has come."""
        self._waiting.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._within.discard(connection)
        self._shown.set(len(self._within))
        self._over.discard(connection)

    def _close_longest_waiting(self) -> None:
        connection, since = next(iter(self._waiting.items()), (None, 0.0))
        if connection is not None and time.monotonic() - since >= _MIN_WAIT_SECONDS:
            self.closed(connection)
            connection.force_close()

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _QUIET_SECONDS:
            self._warned_at = now
            logger.warning(
                "%d connections have requests under way: others are refused (--max-connections)",
                len(self._within),
            )


CONNECTIONS: web.AppKey[Connections] = web.AppKey("connections", Connections)
