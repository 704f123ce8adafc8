"""The facade's view of its engine: is it there, which model, which tokenizer.

One task follows the engine's load reports. When they begin (again), model and tokenizer are
fetched anew, the tokenizer only if its digest changed; when they stop, the facade isn't ready.
So the facade starts without an engine and survives its restarts. An engine that still loads tells
its tokenizer: so the one is read while the other loads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import aclosing
from dataclasses import dataclass

from clients.engine_client import EngineClient
from clients.errors import EngineClientError, InternalError
from clients.text.errors import TextLayerError
from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import ToolFormat, detect_tool_format
from clients.types import ModelInfo, ServerInfo
from http_facade.errors import unavailable

_RECONNECT_SECONDS = 0.25
_MAX_RECONNECT_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    fingerprint: str  # of all that decides what a seed yields
    tool_format: ToolFormat  # as its chat template shows it


@dataclass(frozen=True, slots=True)
class _KnownTokenizer:
    digest: str
    tokenizer: Tokenizer


class EngineConnection:
    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._model: ServedModel | None = None
        self._tokenizer: _KnownTokenizer | None = None  # the newest that was fetched
        self._is_current = False  # the model was fetched since the engine (re)appeared
        self._is_ready = False
        self._refreshing = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """The engine serves, and so does what we know of it."""
        return self._is_ready and self._is_current

    def model(self) -> ServedModel:
        """Raises ApiError 503 as long as no engine was ever ready."""
        if self._model is None:
            raise unavailable("the engine is not there yet")
        return self._model

    async def follow(self) -> None:
        """Runs until cancelled."""
        pause_seconds = _RECONNECT_SECONDS
        while True:
            try:
                async with aclosing(self.client.watch_load()) as reports:
                    async for report in reports:
                        if report.ready and not self._is_current:
                            await self.refresh()
                            logger.info("engine connected, model %s", self.model().info.model)
                        elif self._tokenizer is None:
                            await self._fetch_tokenizer()
                        if self._is_ready != report.ready:
                            logger.info("engine is %s", "ready" if report.ready else "not ready")
                        self._is_ready = report.ready
                        pause_seconds = _RECONNECT_SECONDS
            except EngineClientError as error:
                self._lost(error.message)
            except TextLayerError as error:
                self._lost(f"its tokenizer can't be used: {error.message}")
            except Exception:  # whatever it was, the engine must be found again
                logger.exception("following the engine failed")
                self._lost("see above")
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RECONNECT_SECONDS)

    def _lost(self, why: str) -> None:
        if self._is_ready or self._is_current:
            logger.warning("engine lost: %s", why)
        self._is_ready = False
        self._is_current = False

    async def refresh(self) -> None:
        """Fetches model and tokenizer again. Raises EngineClientError or TextLayerError."""
        async with self._refreshing:
            info = await self.client.get_model_info()
            server = await self.client.get_server_info()
            known = self._tokenizer
            if known is None or known.digest != info.tokenizer_digest:
                known = await self._fetch_tokenizer()
            self._model = ServedModel(
                info,
                known.tokenizer,
                _fingerprint(info, server),
                detect_tool_format(known.tokenizer.chat_template),
            )
            self._is_current = True

    async def _fetch_tokenizer(self) -> _KnownTokenizer:
        bundle = await self.client.get_tokenizer()
        if bundle is None:
            raise InternalError("the engine sent no tokenizer")
        tokenizer = await asyncio.to_thread(Tokenizer.from_files, bundle.files)
        self._tokenizer = _KnownTokenizer(bundle.digest, tokenizer)
        return self._tokenizer


def _fingerprint(info: ModelInfo, server: ServerInfo) -> str:
    backends = ",".join(f"{op}={name}" for op, name in sorted(server.op_backends.items()))
    parts = (
        server.version,
        info.weights_digest,
        info.tokenizer_digest,
        server.device,
        server.dtype,
        server.quantization,
        server.kv_cache_dtype,
        backends,
    )
    return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
