"""The tokenizers in use, by digest: engines with the same one share it."""

from __future__ import annotations

import asyncio
import weakref
from dataclasses import dataclass

from clients.engine_client import EngineClient
from clients.errors import InternalError
from clients.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class KnownTokenizer:
    digest: str
    tokenizer: Tokenizer


class TokenizerShelf:
    """Keeps none alive: those who use them do."""

    def __init__(self) -> None:
        self._tokenizers: weakref.WeakValueDictionary[str, Tokenizer] = (
            weakref.WeakValueDictionary()
        )
        self._newest_digest = ""

    def known(self, digest: str) -> KnownTokenizer | None:
        tokenizer = self._tokenizers.get(digest)
        return None if tokenizer is None else KnownTokenizer(digest, tokenizer)

    async def fetch(self, client: EngineClient) -> KnownTokenizer:
        """The engine's; sent only if it isn't the newest one here. Raises EngineClientError, or
        TextLayerError for files that can't be used."""
        newest = self.known(self._newest_digest)
        bundle = await client.get_tokenizer(newest.digest if newest else "")
        if bundle is None:
            if newest is None:
                raise InternalError("the engine sent no tokenizer")
            return newest
        if known := self.known(bundle.digest):
            return known
        tokenizer = await asyncio.to_thread(Tokenizer.from_files, bundle.files)
        # another engine's may have come meanwhile
        tokenizer = self._tokenizers.setdefault(bundle.digest, tokenizer)
        self._newest_digest = bundle.digest
        return KnownTokenizer(bundle.digest, tokenizer)
