"""Server-sent events on an aiohttp response.

Nothing is sent before `start`. A write waits only for the socket to take more, never otherwise;
a client that is gone cancels the handler, so nothing here looks for it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from aiohttp import web

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies that would collect the events
}
_DONE = b"data: [DONE]\n\n"
_KEEPALIVE = b": keep-alive\n\n"


class EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)
        self._encoder = msgspec.json.Encoder()
        self._written = time.monotonic()

    @property
    def silent_seconds(self) -> float:
        """Since the last write."""
        return time.monotonic() - self._written

    async def start(self) -> None:
        await self._response.prepare(self._request)
        self._written = time.monotonic()

    async def send(self, documents: Iterable[msgspec.Struct]) -> None:
        """One event per document, all in one write."""
        events = [b"data: " + self._encoder.encode(document) + b"\n\n" for document in documents]
        if events:
            await self._response.write(b"".join(events))
            self._written = time.monotonic()

    async def keep_alive(self) -> None:
        await self._response.write(_KEEPALIVE)
        self._written = time.monotonic()

    async def end(self) -> web.StreamResponse:
        await self._response.write(_DONE)
        await self._response.write_eof()
        return self._response
