"""Memory that request bodies may take together: each has its share from before it is read until its
request is answered, as what was read of it goes on to the engine.

The first 64 KiB of a body are not counted: connections bound them already, and so small requests
are taken while large ones wait.
"""

from __future__ import annotations

from aiohttp import web
from prometheus_client import Gauge

from http_facade.errors import overloaded

_SMALL_BYTES = 2**16


class BodyMemory:
    def __init__(self, max_bytes: int, held: Gauge) -> None:
        """`held` shows how many bytes are."""
        self._free_bytes = max_bytes
        self._held = held

    def take(self, num_bytes: int) -> None:
        """Raises ApiError 503."""
        if num_bytes > self._free_bytes:
            raise overloaded("the bodies of other requests take the memory there is for them")
        self._free_bytes -= num_bytes
        self._held.inc(num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes
        self._held.dec(num_bytes)


class BodyShare:
    """Of one request; it begins with nothing."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def hold(self, body_bytes: int) -> None:
        """So many bytes the body has, or more. Raises ApiError 503."""
        more = body_bytes - _SMALL_BYTES - self._num_bytes
        if more > 0:
            self._memory.take(more)
            self._num_bytes += more

    def release(self) -> None:
        self._memory.give_back(self._num_bytes)
        self._num_bytes = 0


BODY_MEMORY: web.AppKey[BodyMemory] = web.AppKey("body_memory", BodyMemory)
