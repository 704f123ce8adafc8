"""A scripted engine behind real sockets, for tests of whatever talks to an engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2_grpc

from clients.errors import (
    ContextLengthExceeded,
    EngineClientError,
    ModelNotFound,
    RequestIdInUse,
    TokenizerStale,
)
from clients.testing import fake_model
from clients.testing.fake_call import FakeCall, Outcome
from clients.testing.script import Script
from clients.testing.servicers import (
    FakeControlServicer,
    FakeEngineServicer,
    FakeHealthServicer,
)
from clients.types import (
    FinishReason,
    GenerateRequest,
    LoadReport,
    ModelInfo,
    ServerInfo,
    TokenizerBundle,
)
from protos import engine_pb2_grpc

ScriptChooser = Callable[[GenerateRequest], Script]

_MESSAGE_BYTES = 64 * 1024 * 1024
_SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
)


@dataclass(frozen=True, slots=True)
class FakeAbort:
    request_id: str
    indices: tuple[int, ...]


class FakeEngine:
    """Plays scripts to real clients, on the event loop of the test.

        async with FakeEngine(model_dir) as fake:
            fake.script(Script.of_tokens((1, 2, 3)))
            ... talk to fake.target ...
            assert await fake.calls[0].wait_closed() is Outcome.CANCELLED

    `model_dir` gives tokenizer, template and configuration; without it there are none. Like the
    engine, the fake refuses a live request id, another model's name, a stale tokenizer digest and
    a prompt that fills the context; `model_info` changes what it knows. A `token` is then
    demanded of every call but those of Control, which want the `admin_key`.
    """

    def __init__(
        self,
        model_dir: Path | None = None,
        *,
        model: str = "fake",
        token: str | None = None,
        admin_key: str | None = None,
        server_credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.tokenizer: TokenizerBundle = fake_model.tokenizer_bundle(model_dir)
        self.model_info: ModelInfo = fake_model.model_info(model, self.tokenizer)
        self.server_info: ServerInfo = fake_model.SERVER_INFO
        self.load: LoadReport = fake_model.READY
        self.token = token
        self.admin_key = admin_key  # None: Control is closed
        self.calls: list[FakeCall] = []  # every Generate that was not refused at the door
        self.aborts: list[FakeAbort] = []
        self.kept_traces: list[str] = []  # ids, as the callers of KeepTraces gave them
        self.is_serving = True
        self.thawed = asyncio.Event()
        self.thawed.set()
        self.state_changed = asyncio.Condition()
        self._scripts: list[Script | ScriptChooser] = [default_script]
        self._num_scripts_played = 0
        self._server_credentials = server_credentials
        self._server: grpc.aio.Server | None = None
        self._port = 0

    # ------------------------------------------------------------ scripting

    def script(self, *scripts: Script | ScriptChooser) -> Self:
        """The nth call from now plays the nth script; the last one repeats."""
        if not scripts:
            raise ValueError("give at least one script")
        self._scripts = list(scripts)
        self._num_scripts_played = 0
        return self

    async def set_serving(self, is_serving: bool) -> None:
        """What health and load say."""
        async with self.state_changed:
            self.is_serving = is_serving
            self.load = dataclasses.replace(self.load, ready=is_serving)
            self.state_changed.notify_all()

    def set_tokenizer(self, bundle: TokenizerBundle) -> None:
        """As after a restart with another model: the old digest is stale from now on."""
        self.tokenizer = bundle
        self.model_info = dataclasses.replace(self.model_info, tokenizer_digest=bundle.digest)

    def freeze(self) -> None:
        """Keeps connections and answers nothing, as a stopped process; `thaw` ends it."""
        self.thawed.clear()

    def thaw(self) -> None:
        self.thawed.set()

    # ------------------------------------------------------------ records

    @property
    def requests(self) -> list[GenerateRequest]:
        return [call.request for call in self.calls]

    @property
    def num_open_calls(self) -> int:
        return sum(call.outcome is Outcome.OPEN for call in self.calls)

    async def wait_for_calls(self, count: int, timeout: float = 10.0) -> Sequence[FakeCall]:
        """Returns once that many calls have arrived; TimeoutError if they do not."""
        async with asyncio.timeout(timeout), self.state_changed:
            await self.state_changed.wait_for(lambda: len(self.calls) >= count)
        return self.calls[:count]

    # ------------------------------------------------------------ life

    @property
    def target(self) -> str:
        """Where clients connect; stays the same across `kill` and `start`."""
        if not self._port:
            raise RuntimeError("the fake engine was not started")
        return f"127.0.0.1:{self._port}"

    async def start(self) -> None:
        """Listens on a free port the first time, on the same one after `stop` or `kill`."""
        server = grpc.aio.server(options=_SERVER_OPTIONS)
        engine_pb2_grpc.add_EngineServicer_to_server(FakeEngineServicer(self), server)
        engine_pb2_grpc.add_ControlServicer_to_server(FakeControlServicer(self), server)
        health_pb2_grpc.add_HealthServicer_to_server(FakeHealthServicer(self), server)
        address = f"127.0.0.1:{self._port}"
        if self._server_credentials is None:
            self._port = server.add_insecure_port(address)
        else:
            self._port = server.add_secure_port(address, self._server_credentials)
        await server.start()
        self._server = server

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Refuses new calls, and ends those that outlast the grace."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(grace_seconds)

    async def kill(self) -> None:
        """Ends every call and connection at once; clients see UNAVAILABLE or CANCELLED."""
        await self.stop(grace_seconds=0.0)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.thaw()
        await self.kill()

    # ------------------------------------------------------------ for the servicers

    async def admit(self, call: FakeCall) -> Script:
        """Records the call and picks its script; raises what the engine would refuse it with."""
        if error := self._refusal(call.request):
            raise error
        async with self.state_changed:
            self.calls.append(call)
            self.state_changed.notify_all()
        script = self._scripts[min(self._num_scripts_played, len(self._scripts) - 1)]
        self._num_scripts_played += 1
        return script if isinstance(script, Script) else script(call.request)

    def flush_prefix_cache(self) -> int:
        """Empties the cached blocks of `load`; returns how many there were."""
        num_blocks = self.load.cached_blocks
        self.load = dataclasses.replace(
            self.load, cached_blocks=0, free_blocks=self.load.free_blocks + num_blocks
        )
        return num_blocks

    def abort(self, request_id: str, indices: tuple[int, ...]) -> None:
        self.aborts.append(FakeAbort(request_id, indices))
        for call in self.calls:
            if call.outcome is Outcome.OPEN and call.request.request_id == request_id:
                call.abort(indices)

    def _refusal(self, request: GenerateRequest) -> EngineClientError | None:
        info = self.model_info
        if request.model not in ("", info.model):
            return ModelNotFound(f"the engine serves {info.model}, not {request.model}")
        if request.tokenizer_digest not in ("", info.tokenizer_digest):
            return TokenizerStale("the token ids were made by another tokenizer")
        if not isinstance(request.prompt, str) and len(request.prompt) >= info.max_model_len:
            return ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens and the context {info.max_model_len}"
            )
        if any(
            call.outcome is Outcome.OPEN and call.request.request_id == request.request_id
            for call in self.calls
        ):
            return RequestIdInUse(f"request id {request.request_id} is in use")
        return None


def default_script(request: GenerateRequest) -> Script:
    """Five tokens a sample, or as many as `max_tokens` allows."""
    max_tokens = request.stopping.max_tokens
    token_ids = (1, 2, 3, 4, 5)[:max_tokens]
    is_cut = max_tokens is not None and max_tokens <= len(token_ids)
    return Script.of_samples(
        [token_ids] * (1 if request.sampling.n is None else request.sampling.n),
        reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
    )
