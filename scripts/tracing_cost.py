"""What tracing costs: CPU time per output token, and the gaps between tokens.

    .venv/bin/python scripts/tracing_cost.py [--rounds N] [--concurrency N] [--json PATH]

Three servers with the embedded model, alike but for their tracing (off, a tenth of the requests,
all), get the same load in turns, so that what else the machine does touches them alike. CPU time is
that of all processes of a server. Prints medians over the rounds, and ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

VARIANTS: Final = {
    "off": ("--trace-dir=none",),
    "10 %": ("--trace-sample-ratio=0.1",),
    "100 %": ("--trace-sample-ratio=1",),
}
_FIRST_PORT: Final = 28_000
_READY_SECONDS: Final = 120.0
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    pid: int

    def cpu_seconds(self) -> tuple[float, float]:
        """Of the engine core, and of all processes that descend from the server's first.

        The core's threads wait for each other awake, so that its time varies with what else the
        machine does; that of the others hardly does.
        """
        parents: dict[int, int] = {}
        ticks: dict[int, int] = {}
        cores: set[int] = set()
        for stat in Path("/proc").glob("[0-9]*/stat"):
            pid = int(stat.parent.name)
            try:
                fields = stat.read_text().rpartition(")")[2].split()
                if b"core_process" in stat.with_name("cmdline").read_bytes():
                    cores.add(pid)
            except OSError:
                continue  # ended meanwhile
            parents[pid] = int(fields[1])
            ticks[pid] = int(fields[11]) + int(fields[12])
        ours = [pid for pid in ticks if self._is_ours(pid, parents)]
        core = sum(ticks[pid] for pid in ours if pid in cores)
        return core / _TICKS_PER_SECOND, sum(ticks[p] for p in ours) / _TICKS_PER_SECOND

    def _is_ours(self, pid: int, parents: dict[int, int]) -> bool:
        while pid and pid != self.pid:
            pid = parents.get(pid, 0)
        return pid == self.pid


@contextmanager
def serving(number: int, flags: tuple[str, ...], directory: Path) -> Iterator[Server]:
    port = _FIRST_PORT + 10 * number
    command = [sys.executable, "-m", "clients", "serve", "--log-level=warning"]
    command += [f"--port={port}", f"--grpc-port={port + 1}", f"--engine-metrics-port={port + 2}"]
    command += [f"--trace-dir={directory / str(number)}", "--access-log=off", *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url)
        yield Server(url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{url}/readyz", timeout=1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def measure(server: Server, concurrency: int, path: Path) -> dict[str, float]:
    """One run of w1."""
    core_before, all_before = server.cpu_seconds()
    command = [sys.executable, "-m", "clients", "bench", "--url", server.url, "--workload", "w1"]
    command += [f"--concurrency={concurrency}", f"--requests={6 * concurrency}"]
    command += ["--quiet", f"--json={path}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (report,) = json.loads(path.read_text())["reports"]
    core, all_processes = server.cpu_seconds()
    core, all_processes = core - core_before, all_processes - all_before
    us_per_token = 1e6 / report["output_tokens"]
    return {
        "cpu_us_per_token": all_processes * us_per_token,
        "outside_core_us_per_token": (all_processes - core) * us_per_token,
        "itl_p99_ms": report["itl_ms"]["p99"],
        "tokens_per_second": report["output_tokens_per_second"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where all figures are written")
    arguments = parser.parse_args()
    rounds: list[dict[str, dict[str, float]]] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(serving(number, flags, directory))
            for number, (name, flags) in enumerate(VARIANTS.items())
        }
        for number in range(arguments.rounds + 1):
            print(f"round {number} of {arguments.rounds}", file=sys.stderr)
            path = directory / "run.json"
            figures = {n: measure(s, arguments.concurrency, path) for n, s in servers.items()}
            if number:  # the first one warms up
                rounds.append(figures)
    for metric in rounds[0]["off"]:
        for name in VARIANTS:
            values = [figures[name][metric] for figures in rounds]
            ratios = [figures[name][metric] / figures["off"][metric] for figures in rounds]
            print(
                f"{metric:25} {name:6} {median(values):9.1f}   x{median(ratios):.3f} of off "
                f"[{min(ratios):.3f}, {max(ratios):.3f}]"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rounds, indent=2) + "\n")


if __name__ == "__main__":
    main()
