"""The facade's view of one engine: is it there, which model, which tokenizer, how busy.

One task follows the engine's load reports. When they begin (again), model and tokenizer are
fetched anew, the tokenizer only if its digest isn't known; when they stop, the engine is lost: it
gets nothing more, and calls that it has not accepted yet are given up. So the facade starts without
an engine and survives its restarts. An engine that still loads tells its tokenizer: so the one is
read while the other loads.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass

from clients.engine_client import EngineClient
from clients.errors import EngineClientError, EngineUnavailable
from clients.text.errors import TextLayerError
from clients.text.tokenizer import Tokenizer
from clients.text.tool_parsers import ToolFormat, detect_tool_format
from clients.types import LoadReport, ModelInfo, ServerInfo
from http_facade.tokenizer_shelf import KnownTokenizer, TokenizerShelf

_RECONNECT_SECONDS = 0.25
_MAX_RECONNECT_SECONDS = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    fingerprint: str  # of all that decides what a seed yields
    tool_format: ToolFormat  # as its chat template shows it


class EngineConnection:
    """`on_change` is told of each change of `is_ready` and of `model`."""

    def __init__(
        self,
        target: str,
        client: EngineClient,
        *,
        model_name: str = "",
        tokenizers: TokenizerShelf,
        on_change: Callable[[EngineConnection], None],
    ) -> None:
        self.target = target  # host:port
        self.client = client
        self._configured_name = model_name  # empty: the engine's own
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._model: ServedModel | None = None
        self._tokenizer: KnownTokenizer | None = None  # the newest that was fetched
        self._is_current = False  # the model was fetched since the engine (re)appeared
        self._is_ready = False
        self._absent_because = ""  # what was last said of it
        self._refreshing = asyncio.Lock()
        self._max_num_seqs = 1
        self._others_samples = 0  # at the engine as of its last report, without ours
        self._own_samples = 0
        self._unaccepted: set[asyncio.Timeout] = set()  # one per call that waits for Accepted
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        """The engine serves, and so does what we know of it."""
        return self._is_ready and self._is_current

    @property
    def model(self) -> ServedModel | None:
        """None as long as the engine was never ready."""
        return self._model

    @property
    def model_name(self) -> str:
        """What requests call its model; empty as long as that is not known."""
        if self._configured_name or self._model is None:
            return self._configured_name
        return self._model.info.model

    # ------------------------------------------------------------ its load

    @property
    def load(self) -> int:
        """Samples that run or wait there, as far as we know."""
        return self._others_samples + self._own_samples

    @property
    def capacity(self) -> int:
        """Samples that run at once, if the memory suffices."""
        return self._max_num_seqs

    @contextmanager
    def working(self, num_samples: int) -> Iterator[None]:
        """Counts a call of ours for as long as the block lasts."""
        self._own_samples += num_samples
        self._idle.clear()
        try:
            yield
        finally:
            self._own_samples -= num_samples
            if not self._own_samples:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns when no call of ours is there."""
        await self._idle.wait()

    @asynccontextmanager
    async def while_there(self) -> AsyncIterator[None]:
        """For the wait for Accepted: EngineUnavailable as soon as the engine is lost."""
        try:
            async with asyncio.timeout(None) as patience:
                self._unaccepted.add(patience)
                try:
                    yield
                finally:
                    self._unaccepted.discard(patience)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer") from None

    # ------------------------------------------------------------ following it

    async def follow(self) -> None:
        """Runs until cancelled."""
        pause_seconds = _RECONNECT_SECONDS
        while True:
            try:
                async with aclosing(self.client.watch_load()) as reports:
                    async for report in reports:
                        await self._reported(report)
                        pause_seconds = _RECONNECT_SECONDS
            except EngineUnavailable as error:
                self._lost(error.message, is_usual=True)
            except EngineClientError as error:
                self._lost(error.message)
            except TextLayerError as error:
                self._lost(f"its tokenizer can't be used: {error.message}")
            except Exception:  # whatever it was, the engine must be found again
                logger.exception("following engine %s failed", self.target)
                self._lost("see above")
            await asyncio.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _MAX_RECONNECT_SECONDS)

    async def refresh(self) -> None:
        """Fetches model and tokenizer again. Raises EngineClientError or TextLayerError."""
        async with self._refreshing:
            info = await self.client.get_model_info()
            server = await self.client.get_server_info()
            known = self._tokenizer
            if known is None or known.digest != info.tokenizer_digest:
                known = self._tokenizers.known(info.tokenizer_digest)
                known = known or await self._tokenizers.fetch(self.client)
            self._tokenizer = known
            self._max_num_seqs = max(1, server.max_num_seqs)
            self._model = ServedModel(
                info,
                known.tokenizer,
                _fingerprint(info, server),
                detect_tool_format(known.tokenizer.chat_template),
            )
            self._is_current = True
            self._on_change(self)

    async def _reported(self, report: LoadReport) -> None:
        if report.ready and not self._is_current:
            await self.refresh()
            logger.info("engine %s connected, model %s", self.target, self.model_name)
        elif self._tokenizer is None:
            self._tokenizer = await self._tokenizers.fetch(self.client)
        samples = max(report.num_running + report.num_waiting, report.num_requests)
        self._others_samples = max(0, samples - self._own_samples)
        if self._is_ready != report.ready:
            self._is_ready = report.ready
            logger.info("engine %s is %s", self.target, "ready" if report.ready else "not ready")
            self._on_change(self)

    def _lost(self, why: str, *, is_usual: bool = False) -> None:
        """`is_usual`: so it is, too, before it has started."""
        if not self._is_ready and not self._is_current:
            if why != self._absent_because:  # once, not at each attempt
                level = logging.INFO if is_usual else logging.WARNING
                logger.log(level, "engine %s is not there: %s", self.target, why)
            self._absent_because = why
            return
        logger.warning("engine %s lost: %s", self.target, why)
        self._absent_because = why
        self._is_ready = False
        self._is_current = False
        self._others_samples = 0
        now = asyncio.get_running_loop().time()
        for patience in self._unaccepted:
            patience.reschedule(now)
        self._on_change(self)


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
