"""How long a connection may keep still, so that those who hold many can't take them from others.

    head     from the connection's start, or a request's first bytes, to the end of its head
    idle     between an answer and the first bytes of the next request
    unread   of an answer that is there, the client takes nothing

Of one over the limit (`connections.py`) the head has less time, and its first answer is the last.
The body has a limit of its own (`body.py`), and so has the TLS handshake (`tls.py`). While the
engine is at work a connection may keep still for as long as that takes.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import sys
import termios

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from http_facade.connections import Connections

_HEAD_SECONDS = 60.0
_HEAD_SECONDS_OVER_LIMIT = 5.0
# Longer than load balancers keep theirs (up to 600): the side that asks should be first to close,
# else a request may meet a connection that is just being closed.
_IDLE_SECONDS = 620.0
_UNREAD_SECONDS = 60.0  # as the engine waits for the facade

logger = logging.getLogger(__name__)


class PatientHandler(RequestHandler):
    __slots__ = (
        "_connections",
        "_head_timer",
        "_unread_bytes",
        "_unread_timer",
        "is_over_limit",
    )

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        connections: Connections,
    ) -> None:
        super().__init__(manager, loop=loop, keepalive_timeout=_IDLE_SECONDS)
        self._connections = connections
        self.is_over_limit = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._unread_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0  # that were waiting for the client at the last look

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.is_over_limit = not self._connections.opened(self)
        seconds = _HEAD_SECONDS_OVER_LIMIT if self.is_over_limit else _HEAD_SECONDS
        self._head_timer = self._loop.call_later(seconds, self._head_is_late)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.closed(self)
        super().connection_lost(exc)
        self._forget_head()
        self._forget_unread()

    # ------------------------------------------------------------ a request's head

    def data_received(self, data: bytes) -> None:
        num_heads = self._request_count
        super().data_received(data)
        if self._request_count > num_heads:
            self._forget_head()
            self._connections.is_asked(self)
        elif data and self._head_timer is None and self._waits_for_a_request:
            self._head_timer = self._loop.call_later(_HEAD_SECONDS, self._head_is_late)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self.is_over_limit:
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if not self._messages:
            self._connections.waits(self)
        return finished

    @property
    def _waits_for_a_request(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.force_close()

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # ------------------------------------------------------------ an answer that is not taken

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.transport is not None:
            self._look_later(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def _look_later(self, transport: asyncio.Transport) -> None:
        self._unread_bytes = _num_unread_bytes(transport)
        self._unread_timer = self._loop.call_later(_UNREAD_SECONDS, self._look, transport)

    def _look(self, transport: asyncio.Transport) -> None:
        """Who writes waits for the client, but for 64 KiB: fewer bytes say that it took some."""
        if _num_unread_bytes(transport) < self._unread_bytes:
            self._look_later(transport)
            return
        logger.warning("a client took nothing for %g s: it is left", _UNREAD_SECONDS)
        transport.abort()  # to close it would wait for the client, too

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None


def _num_unread_bytes(transport: asyncio.Transport) -> int:
    """Ours, and what the system has taken of us and not yet got rid of: that may be megabytes, of
    which it asks for more only when a third is gone."""
    connection = transport.get_extra_info("socket")
    queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
