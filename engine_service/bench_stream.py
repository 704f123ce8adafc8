"""python -m engine_service.bench_stream --json PATH: what a token costs outside the core.

    load (here) --HTTP, SSE--> facade --gRPC--> engine service --> `scripted_core`

The processes are those of `firsttoken serve`, with a core that costs nothing. Milliseconds of CPU
time per output token of engine service and facade, with so many streams at a time, prompts and
ends of requests included; the least of some runs, so that what else the machine does counts little.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from engine_service.config import CoreConfig, ModelConfig, ServiceConfig
from engine_service.core_launcher import ProcessLauncher
from engine_service.model_store import resolve_model
from engine_service.service import run

NUM_STREAMS: Final = (8, 32)
NUM_TOKENS: Final = 64
_REQUESTS_PER_STREAM: Final = 4
_NUM_RUNS: Final = 3
_PROMPT: Final = "word " * 55
_ENGINE: Final = "engine"  # the argument that makes this module the engine service
_MODEL_NAME: Final = "scripted"
_FACADE_FLAGS: Final = ("--trace-dir=none", "--log-level=warning")
_READY_TRIES: Final = 200
_READY_PAUSE_SECONDS: Final = 0.05

Figures = dict[str, float]


def measure(
    model: str | None = None,
    num_streams: tuple[int, ...] = NUM_STREAMS,
    num_tokens: int = NUM_TOKENS,
    num_runs: int = _NUM_RUNS,
) -> Figures:
    """{"engine_8_ms": ..., "facade_8_ms": ..., ...}"""
    figures: Figures = {}
    with _serving(model) as (engine, facade, http):
        numbers = itertools.count()  # no prompt comes twice
        for streams in num_streams:
            runs = [
                _cpu_of_a_run(http, (engine, facade), numbers, streams, num_tokens)
                for _ in range(num_runs + 1)
            ]
            best = [min(costs) for costs in zip(*runs[1:], strict=True)]  # the first one warms up
            figures |= {f"engine_{streams}_ms": best[0], f"facade_{streams}_ms": best[1]}
    return figures


def _cpu_of_a_run(
    http: str, pids: tuple[int, int], numbers: Iterator[int], num_streams: int, num_tokens: int
) -> list[float]:
    """Milliseconds per token of each process."""
    before = [_cpu_seconds(pid) for pid in pids]
    asyncio.run(_run_streams(http, numbers, num_streams, num_tokens))
    after = [_cpu_seconds(pid) for pid in pids]
    total_tokens = num_streams * _REQUESTS_PER_STREAM * num_tokens
    return [1e3 * (b - a) / total_tokens for a, b in zip(before, after, strict=True)]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user, system


# ---------------------------------------------------------------- the load


async def _run_streams(
    http: str, numbers: Iterator[int], num_streams: int, num_tokens: int
) -> None:
    async def one_after_another() -> None:
        for _ in range(_REQUESTS_PER_STREAM):
            await _stream(http, f"{next(numbers)} {_PROMPT}", num_tokens)

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(one_after_another())


async def _stream(http: str, prompt: str, num_tokens: int) -> None:
    """Reads one answer without looking into it. Raises RuntimeError unless it was complete."""
    address = urlsplit(http)
    body = json.dumps(
        {
            "model": _MODEL_NAME,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    if answer.count(b"data: ") <= num_tokens or b"data: [DONE]" not in answer:
        raise RuntimeError(f"not an answer of {num_tokens} tokens: {answer[:300]!r}")


# ---------------------------------------------------------------- the processes


@contextmanager
def _serving(model: str | None) -> Iterator[tuple[int, int, str]]:
    """Process ids of engine service and facade, and where HTTP is."""
    engine = ["engine_service.bench_stream", _ENGINE, *([model] if model else [])]
    with _process(engine) as (engine_pid, engine_at):
        facade = ["http_facade", f"--engine={engine_at['grpc']}", "--port=0"]
        with _process([*facade, *_FACADE_FLAGS]) as (facade_pid, facade_at):
            asyncio.run(_until_ready(facade_at["http"]))
            yield engine_pid, facade_pid, facade_at["http"]


@contextmanager
def _process(command: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """A module that runs until the end of the block, and the line with which it said where."""
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.pid, _listening(process)
        finally:
            process.terminate()


def _listening(process: subprocess.Popen[str]) -> dict[str, str]:
    for line in process.stdout or ():
        said: dict[str, str] = json.loads(line)
        if said["event"] == "listening":
            return said
    raise RuntimeError(f"{process.args!r} ended with {process.wait()} before it listened")


async def _until_ready(http: str) -> None:
    for _ in range(_READY_TRIES):
        try:
            return await _stream(http, _PROMPT, 1)
        except RuntimeError:
            await asyncio.sleep(_READY_PAUSE_SECONDS)
    await _stream(http, _PROMPT, 1)


async def _serve_scripted(model: str | None) -> int:
    """The engine service with a scripted core; its tokenizer is the model's."""
    core = CoreConfig(ModelConfig(str(resolve_model(model)), _MODEL_NAME))
    config = ServiceConfig(core, grpc_port=0, metrics_port=0, log_level="warning")
    return await run(config, ProcessLauncher("warning", "engine_service.scripted_core"))


def main() -> None:
    if sys.argv[1:2] == [_ENGINE]:
        sys.exit(asyncio.run(_serve_scripted(sys.argv[2] if sys.argv[2:] else None)))
    parser = argparse.ArgumentParser(prog="bench_stream", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="whose tokenizer; none: the embedded model's")
    arguments = parser.parse_args()
    figures = measure(arguments.model)
    for name, value in figures.items():
        print(f"{name:<16} {value:8.3f}")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
