"""All keys of one edge: those of its command line, and those of its file, which may change.

A file that can't be used stops a start. While running, the keys that were known stay then, and the
log says why. Requests that run keep the key they came with.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from access.keys import ApiKey, find_key
from access.keys_file import KeysFileError, read_keys_file
from access.watch import FileWatch, follow

logger = logging.getLogger(__name__)


class KeyStore:
    def __init__(
        self,
        keys: Sequence[ApiKey] = (),
        *,
        extra_keys: Sequence[ApiKey] = (),
        path: Path | None = None,
    ) -> None:
        """`extra_keys` are taken, too, but do not by themselves close an edge: the key of
        operators. Raises KeysFileError."""
        self._fixed = (*keys, *extra_keys)
        self._path = path
        self._watch = FileWatch([path] if path else [])  # before it is read: no change is missed
        self._keys = self._fixed if path is None else (*self._fixed, *read_keys_file(path))
        self.is_required = bool(keys) or path is not None  # whether who has none is refused

    @property
    def has_admin(self) -> bool:
        return any(key.is_admin for key in self._keys)

    def find(self, given: str) -> ApiKey | None:
        return find_key(given, self._keys)

    async def follow_file(self) -> None:
        """Runs until cancelled; ends at once where there is no file."""
        if self._path is not None:
            await follow(self._watch, self.reload)

    def reload(self) -> None:
        if self._path is None:
            return
        try:
            keys = read_keys_file(self._path)
        except KeysFileError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._keys = (*self._fixed, *keys)
        logger.info("%s: %d API keys", self._path, len(keys))
