"""Work that grows with what a caller sends leaves the event loop where there is much of it, so that
other requests' tokens keep flowing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

# up to here a thread costs more than it spares
INLINE_CHARS = 4_000  # of a text to render or to encode
INLINE_BYTES = 16_000  # of JSON, which is read faster

ResultT = TypeVar("ResultT")


async def run_by_size(
    work: Callable[[], ResultT], size: int, *, max_inline: int = INLINE_CHARS
) -> ResultT:
    """In a thread if `size` is more than `max_inline`."""
    return work() if size <= max_inline else await asyncio.to_thread(work)
