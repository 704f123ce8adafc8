"""`firsttoken serve` as a user starts it, and the little that tests need to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from clients import EngineClient, LoadReport

START_SECONDS = 120.0


@dataclass(frozen=True)
class Served:
    """A running engine and facade; `log` holds what they wrote."""

    http: str
    grpc: str
    metrics: str
    pid: int
    trace_dir: Path
    log: Path
    model: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def serve(model_dir: Path, work_dir: Path, *flags: str) -> Iterator[Served]:
    """Runs `firsttoken serve MODEL` until the block ends; fails if it doesn't stop cleanly."""
    ports = {name: free_port() for name in ("port", "grpc-port", "engine-metrics-port")}
    log = work_dir / "serve.log"
    served = Served(
        http=f"http://127.0.0.1:{ports['port']}",
        grpc=f"127.0.0.1:{ports['grpc-port']}",
        metrics=f"http://127.0.0.1:{ports['engine-metrics-port']}",
        pid=0,
        trace_dir=work_dir / "traces",
        log=log,
        model=model_dir.name,
    )
    command = [sys.executable, "-m", "clients", "serve", str(model_dir)]
    command += [part for name, port in ports.items() for part in (f"--{name}", str(port))]
    command += ["--trace-dir", str(served.trace_dir), *flags]
    # As a user starts it: the limit on threads that the tests set for themselves does not apply.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        _wait_ready(served, process)
        yield Served(**{**vars(served), "pid": process.pid})
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _wait_ready(served: Served, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"serve ended with {process.returncode}:\n{served.log.read_text()}")
        if probe(served.http + "/readyz") == 200:
            return
        time.sleep(0.2)
    raise TimeoutError(f"not ready in time:\n{served.log.read_text()}")


def probe(url: str) -> int:
    """The status of a GET, 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


# ---------------------------------------------------------------- HTTP


@dataclass
class Stream:
    """One SSE answer, as it came in."""

    status: int
    headers: Mapping[str, str]
    raw: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)  # [DONE] left out
    times: list[float] = field(default_factory=list)  # of each event, time.monotonic()
    num_done: int = 0
    after_done: bytes = b""

    def choice_chunks(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for e in self.events for c in e.get("choices", ()) if c["index"] == index]

    def deltas(self, index: int = 0) -> list[str]:
        """Non-empty text pieces of one choice."""
        texts = [_text(choice) for choice in self.choice_chunks(index)]
        return [text for text in texts if text]

    def text(self, index: int = 0) -> str:
        return "".join(self.deltas(index))

    def delta_times(self, index: int = 0) -> list[float]:
        return [
            at
            for event, at in zip(self.events, self.times, strict=True)
            for choice in event.get("choices", ())
            if choice["index"] == index and _text(choice)
        ]

    def finish_reasons(self, index: int = 0) -> list[str]:
        chunks = self.choice_chunks(index)
        return [c["finish_reason"] for c in chunks if c["finish_reason"] is not None]

    def usage(self) -> dict[str, Any] | None:
        usages = [event["usage"] for event in self.events if event.get("usage")]
        return usages[-1] if usages else None


def _text(choice: Mapping[str, Any]) -> str:
    text = choice["text"] if "text" in choice else choice["delta"].get("content")
    return text or ""


async def post(
    base: str, path: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, Any], Mapping[str, str]]:
    """Status, JSON body and headers of one request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"content-type": "application/json", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(base + path, data=data, headers=sent) as answer,
    ):
        return answer.status, await answer.json(), answer.headers


async def stream(
    base: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
) -> Stream:
    """Sends with `stream: true` and reads to the end."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(base + path, json={**body, "stream": True}, headers=headers) as answer,
    ):
        result = Stream(answer.status, answer.headers)
        buffer = b""
        async for data in answer.content.iter_any():
            result.raw += data
            buffer += data
            while b"\n\n" in buffer:
                event, buffer = buffer.split(b"\n\n", 1)
                _take(result, event)
        result.after_done = buffer
        return result


def _take(result: Stream, event: bytes) -> None:
    if not event.startswith(b"data: "):
        return  # a keep-alive comment
    payload = event.removeprefix(b"data: ")
    if payload == b"[DONE]":
        result.num_done += 1
        return
    result.events.append(json.loads(payload))
    result.times.append(time.monotonic())


# ---------------------------------------------------------------- the engine's side


@contextlib.asynccontextmanager
async def engine(served: Served) -> AsyncIterator[EngineClient]:
    async with EngineClient(served.grpc) as client:
        yield client


async def load(served: Served) -> LoadReport:
    async with engine(served) as client:
        return await client.get_load()


async def wait_idle(served: Served, seconds: float) -> LoadReport:
    """The leak oracle (L6): at idle nothing runs, nothing is held, nothing is lost."""
    deadline = time.monotonic() + seconds
    async with engine(served) as client:
        while True:
            report = await client.get_load()
            if is_idle(report):
                return report
            if time.monotonic() > deadline:
                raise AssertionError(f"not idle after {seconds} s: {report}")
            await asyncio.sleep(0.05)


def is_idle(report: LoadReport) -> bool:
    return (
        report.num_running == report.num_waiting == report.used_blocks == report.num_requests == 0
        and report.free_blocks + report.cached_blocks == report.total_blocks
    )


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
