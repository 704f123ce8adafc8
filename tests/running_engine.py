"""A running engine service for tests, and a plain gRPC client of it: stubs only, no client library.

Either a process of its own (`engine_process`), as users run it, or an `EngineService` in the
test's loop (`service_config`), where a test needs settings that have no flag.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import grpc
import msgspec
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, ServiceConfig
from protos import engine_pb2 as pb
from protos import engine_pb2_grpc as pb_grpc

START_SECONDS = 60.0
# Of a tiny model, and of a request to it that runs until somebody ends it: on any machine longer
# than a test takes to do so.
LONG_CONTEXT = {"max_position_embeddings": 65_536}
ENDLESS = 60_000  # tokens
ROOM_FOR_ENDLESS = "--num-gpu-blocks-override=8192"


@dataclass(frozen=True)
class Engine:
    grpc: str
    metrics: str
    model: str
    process: subprocess.Popen[str]
    log: Path


@contextlib.contextmanager
def engine_process(model_dir: Path, work_dir: Path, *flags: str) -> Iterator[Engine]:
    """`python -m engine_service` until the block ends; it must then leave within its grace."""
    log = work_dir / "engine.log"
    command = [sys.executable, "-m", "engine_service", str(model_dir)]
    command += ["--grpc-port=0", "--engine-metrics-port=0", "--num-threads=1"]
    command += ["--shutdown-timeout=5", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        said: dict[str, str] = {}
        while said.get("event") != "listening":
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"the engine ended with {process.wait()}:\n{log.read_text()}")
            said = json.loads(line)
        yield Engine(said["grpc"], said["metrics"], said["model"], process, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        if process.stdout is not None:
            process.stdout.close()


def service_config(model_dir: Path, **fields: object) -> ServiceConfig:
    core = CoreConfig(
        model=ModelConfig(str(model_dir), "tiny"),
        cache=CacheConfig(num_blocks=512),
        num_threads=1,
        check_integrity=True,
    )
    config = ServiceConfig(core=core, grpc_port=0, metrics_port=0, shutdown_timeout_seconds=5)
    return msgspec.structs.replace(config, **fields)


# ---------------------------------------------------------------- requests


def request(
    *,
    request_id: str = "",
    prompt: list[int] | str | None = None,
    max_tokens: int = 8,
    n: int = 1,
    temperature: float = 0.0,
) -> pb.GenerateRequest:
    """Greedy and without end token, so that its length is known."""
    message = pb.GenerateRequest(
        request_id=request_id,
        sampling=pb.SamplingParams(temperature=temperature, n=n),
        stopping=pb.StoppingCriteria(max_tokens=max_tokens, ignore_eos=True),
    )
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt if prompt is not None else [11, 12, 13, 14, 15])
    return message


@dataclass
class Answer:
    """One stream, read to its end."""

    events: list[pb.GenerateEvent] = field(default_factory=list)
    code: grpc.StatusCode = grpc.StatusCode.OK
    error: str = ""
    details: list[object] = field(default_factory=list)  # ErrorInfo, RetryInfo, BadRequest

    def tokens(self, index: int = 0) -> list[int]:
        return [
            token
            for event in self.events
            if event.index == index
            for token in event.delta.token_ids
        ]

    def kinds(self, index: int = 0) -> list[str]:
        return [str(e.WhichOneof("event")) for e in self.events if e.index == index]

    def finished(self, index: int = 0) -> pb.Finished:
        (finished,) = (
            event.finished
            for event in self.events
            if event.index == index and event.HasField("finished")
        )
        return finished

    @property
    def reason(self) -> str:
        (info,) = (d for d in self.details if isinstance(d, error_details_pb2.ErrorInfo))
        return str(info.reason)

    @property
    def retry_after_seconds(self) -> float | None:
        for detail in self.details:
            if isinstance(detail, error_details_pb2.RetryInfo):
                return float(detail.retry_delay.ToNanoseconds() / 1e9)
        return None

    @property
    def fields(self) -> list[str]:
        return [
            violation.field
            for detail in self.details
            if isinstance(detail, error_details_pb2.BadRequest)
            for violation in detail.field_violations
        ]


class Client:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.engine = pb_grpc.EngineStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def generate(
        self, message: pb.GenerateRequest, *, timeout: float | None = None
    ) -> Answer:
        answer = Answer()
        call = self.engine.Generate(message, timeout=timeout)
        try:
            async for event in call:
                answer.events.append(event)
        except grpc.aio.AioRpcError as error:
            answer.code, answer.error = error.code(), error.details() or ""
            answer.details = _details(error)
        return answer

    async def load(self) -> pb.LoadReport:
        return await self.engine.GetLoad(pb.GetLoadRequest())

    async def core_pid(self) -> int:
        return (await self.engine.GetServerInfo(pb.GetServerInfoRequest())).core_pid

    async def is_serving(self, service: str = "") -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def wait_serving(self, serving: bool, seconds: float) -> float:
        """Seconds until health says so."""
        began = time.monotonic()
        while await self.is_serving() is not serving:
            assert time.monotonic() - began < seconds, f"serving is not {serving} in {seconds} s"
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def wait_load(
        self, holds: Callable[[pb.LoadReport], bool], seconds: float
    ) -> pb.LoadReport:
        """The load report is that of the last step, so what was just done takes a moment."""
        deadline = time.monotonic() + seconds
        while True:
            load = await self.load()
            if holds(load):
                return load
            assert time.monotonic() < deadline, f"not so in {seconds} s: {load}"
            await asyncio.sleep(0.02)

    async def wait_running(self, count: int) -> None:
        await self.wait_load(lambda load: load.num_running >= count, seconds=30)

    async def wait_idle(self, seconds: float) -> pb.LoadReport:
        return await self.wait_load(is_idle, seconds)


def is_idle(load: pb.LoadReport) -> bool:
    """The leak oracle: nothing runs, nothing is held, nothing is lost."""
    busy = load.num_running + load.num_waiting + load.num_requests + load.used_blocks
    return busy == 0 and load.free_blocks + load.cached_blocks == load.total_blocks


async def next_event(
    call: grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent],
) -> pb.GenerateEvent | None:
    """None at the end of the stream."""
    event = await call.read()
    return event if isinstance(event, pb.GenerateEvent) else None


def _details(error: grpc.aio.AioRpcError) -> list[object]:
    rich = status_pb2.Status()
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata())
    for key, value in metadata:
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            rich.ParseFromString(value)
    found: list[object] = []
    for detail in rich.details:
        for kind in ("ErrorInfo", "RetryInfo", "BadRequest"):
            message = getattr(error_details_pb2, kind)()
            if detail.Unpack(message):
                found.append(message)
    return found


@contextlib.asynccontextmanager
async def client(address: str, **options: int) -> AsyncIterator[Client]:
    arguments = [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(address, options=arguments) as channel:
        yield Client(channel)
