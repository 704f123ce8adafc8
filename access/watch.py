"""Files that may change while we run: looked at once a second, by what the file system says.

A look costs a stat. Replaced files, files written in place and links that are pointed elsewhere
(as mounted secrets are) all count as changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path

POLL_SECONDS = 1.0

_Stamp = tuple[int, int, int] | None  # None: there is no such file


class FileWatch:
    def __init__(self, paths: Iterable[Path]) -> None:
        """What is there now is what counts as unchanged."""
        self._paths = tuple(paths)
        self._stamps = self._look()

    def has_changed(self) -> bool:
        """Since the last time that it was asked."""
        before, self._stamps = self._stamps, self._look()
        return self._stamps != before

    def _look(self) -> tuple[_Stamp, ...]:
        return tuple(map(_stamp, self._paths))


def _stamp(path: Path) -> _Stamp:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


async def follow(watch: FileWatch, on_change: Callable[[], None]) -> None:
    """Runs until cancelled. `on_change` raises nothing."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if watch.has_changed():
            on_change()
