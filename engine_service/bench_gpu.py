"""python -m engine_service.bench_gpu --json PATH: what this GPU gives, and if it computes right.

    limits            copies on the device and a large matrix product: what bounds the rest
    checks            every Triton kernel beside the reference
    kernels           how long they take, as shares of the limits
    engine-*          the engine core with random weights in the shapes of Llama
    transformers-*    transformers' generate in the same shapes

Each part runs in a process of its own, so that a fault in one spoils no other; after a fault the
part goes on with its next item. The checks, most of whose time is that of compiling, share their
items among several processes where the GPU has memory for them. Figures are in the file as soon as
they are measured. Without a GPU only the checks run, in Triton's interpreter, which has to be on
(`scripts/bench_gpu.sh`).

Exits with 1 if anything failed or was not reached in time.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Final

import torch

from engine_service.bench_gpu_part import PARTS
from engine_service.bench_gpu_report import Report

_TOTAL_SECONDS: Final = 450.0
_ITEM_SECONDS: Final = 90.0  # the start of a process counts as one
_EXIT_SECONDS: Final = 10.0
_WITHOUT_GPU: Final = ("checks",)
_MOST_PROCESSES: Final = {"checks": 4}  # at once; one for every other part, whose time is taken
_PROCESS_BYTES: Final = 16 << 30  # of the GPU's memory
# No part takes the time of the others.
_PART_SECONDS: Final = {
    "limits": 40.0,
    "checks": 150.0,
    "kernels": 90.0,
    "engine-1b": 110.0,
    "engine-8b": 80.0,
    "transformers-1b": 60.0,
    "transformers-8b": 70.0,
}


class PartRunner:
    """Runs parts as processes until the time is over."""

    def __init__(self, report: Report, total_seconds: float, item_seconds: float) -> None:
        self._report = report
        self._end = time.monotonic() + total_seconds
        self._deadline = self._end  # of the part that runs
        self._item_seconds = item_seconds

    def run(
        self, part: str, command: Sequence[str], seconds: float, num_processes: int = 1
    ) -> None:
        """`command` starts the part; it is started again for what a dead process left."""
        self._deadline = min(self._end, time.monotonic() + seconds)
        with ThreadPoolExecutor(num_processes) as pool:
            shares = [f"{number}/{num_processes}" for number in range(num_processes)]
            running = [
                pool.submit(self._run_share, part, [*command, "--share", share]) for share in shares
            ]
            try:
                for future in running:
                    future.result()
            except BaseException:  # interrupted: no process is started again
                self._deadline = 0.0
                raise

    def _run_share(self, part: str, command: Sequence[str]) -> None:
        done: set[str] = set()
        while True:
            process = [*command, "--skip", json.dumps(sorted(done))]
            items = self._run_process(part, process, done)
            left = [item for item in items if item not in done]
            if not left:
                return
            if time.monotonic() >= self._deadline:
                for item in left:
                    self._report.fail(part, item, "no time was left")
                return

    def _run_process(self, part: str, command: Sequence[str], done: set[str]) -> list[str]:
        """Adds what it finishes to `done`; returns all items of its share."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        items: list[str] = []
        begun: str | None = "its start"
        why = ""
        try:
            while (event := self._next_event(lines)) is not None:
                if "items" in event:
                    self._report.device, items = event["device"], event["items"]
                    begun = None
                    continue
                begun = event["item"]
                if "figures" in event:
                    self._report.add(part, begun, event["figures"])
                elif "failure" in event:
                    self._report.fail(part, begun, event["failure"])
                else:
                    _say(f"{part}: {begun}")
                    continue
                done.add(begun)
                begun = None
        except TimeoutError as error:
            why = str(error)
        finally:
            status = _end(process, grace_seconds=0.0 if why else _EXIT_SECONDS)
            reader.join()
            process.stdout.close()
        if begun is not None:
            self._report.fail(part, begun, why or f"the process ended with status {status}")
            done.add(begun)
        return items

    def _next_event(self, lines: queue.Queue[str | None]) -> dict[str, Any] | None:
        """None: the process ended. Raises TimeoutError."""
        seconds_left = self._deadline - time.monotonic()
        try:
            line = lines.get(timeout=max(min(self._item_seconds, seconds_left), 0.0))
        except queue.Empty:
            is_over = seconds_left <= self._item_seconds
            raise TimeoutError("no time was left" if is_over else "it took too long") from None
        return None if line is None else json.loads(line)


def _end(process: subprocess.Popen[str], grace_seconds: float) -> int:
    """Its exit status."""
    try:
        return process.wait(grace_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _num_processes(part: str, report: Report) -> int:
    """As many as a part may have and the GPU has memory for, once a part before it told of that."""
    memory_bytes = report.device.get("memory_bytes", 0)
    assert isinstance(memory_bytes, int)
    return max(1, min(_MOST_PROCESSES.get(part, 1), memory_bytes // _PROCESS_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_gpu", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--total-seconds", type=float, default=_TOTAL_SECONDS)
    parser.add_argument("--item-seconds", type=float, default=_ITEM_SECONDS)
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    report = Report(arguments.json)
    runner = PartRunner(report, arguments.total_seconds, arguments.item_seconds)
    for part in arguments.only:
        if has_gpu or part in _WITHOUT_GPU:
            command = [sys.executable, "-m", "engine_service.bench_gpu_part", part]
            num_processes = _num_processes(part, report)
            runner.run(part, command, _PART_SECONDS[part], num_processes)
    report.write()
    print(report.table())
    if not has_gpu:
        print("No GPU: kernels were checked in Triton's interpreter; nothing was measured.")
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
