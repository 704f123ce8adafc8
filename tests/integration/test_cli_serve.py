"""`firsttoken serve` as a user runs it: real processes, real sockets, a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import MakeTinyModel

ANY_PORTS = ("--port=0", "--grpc-port=0", "--engine-metrics-port=0")


def command_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


class Serve:
    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "clients", "serve", *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def until_announced(self) -> str:
        """What it printed up to the hint on Ctrl-C; its HTTP address is kept."""
        assert self.process.stdout is not None
        text = ""
        while "Ctrl-C" not in text:
            line = self.process.stdout.readline()
            assert line, f"ended: {self.log.read_text()[-2000:]}"
            text += line
        match = re.search(r"http://[\d.]+:\d+(?=/v1$)", text, re.M)
        assert match
        self.http = match[0]
        return text

    def complete(self, prompt: str) -> str:
        body = {"model": self.model(), "prompt": prompt, "max_tokens": 4, "temperature": 0}
        request = urllib.request.Request(
            f"{self.http}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def model(self) -> str:
        with urllib.request.urlopen(f"{self.http}/v1/models", timeout=30) as answer:
            return str(json.load(answer)["data"][0]["id"])

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.http}/readyz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def children(self) -> dict[str, int]:
        """Process id by module."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        found = {}
        for pid in map(int, listed.split()):
            command = command_of(pid)
            found[command[command.index("-m") + 1]] = pid
        return found

    def session_of(self, pid: int) -> list[int]:
        """Every process of the child's session, its own children among them."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == pid:
                found.append(int(path.parent.name))
        return found

    def finish(self) -> int:
        assert self.process.stdout is not None
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        return code


@pytest.fixture
def served(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path / "log", str(tiny_model_dir("llama")), *ANY_PORTS, "--num-threads=1")
    yield serve
    if serve.process.poll() is None:
        serve.process.kill()
        serve.finish()


def until(condition: str, deadline_seconds: float, check: object) -> None:
    assert callable(check)
    deadline = time.monotonic() + deadline_seconds
    while not check():
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)


def test_it_serves_survives_a_dead_engine_and_stops_clean(served: Serve) -> None:
    text = served.until_announced()
    assert "curl -N http://" in text
    first = served.complete("The capital of France is")
    children = served.children()
    assert children.keys() == {"engine_service", "http_facade"}
    sessions = [served.session_of(pid) for pid in children.values()]
    pids = [pid for session in sessions for pid in session]
    cores = [pid for pid in pids if "engine_service.core_process" in command_of(pid)]
    assert len(cores) == 1  # the engine's own child
    policies = {pid: os.sched_getscheduler(pid) for pid in (*children.values(), *cores)}
    assert [pid for pid, policy in policies.items() if policy == os.SCHED_OTHER] == cores
    assert {policies[pid] for pid in children.values()} == {os.SCHED_BATCH}

    os.kill(children["engine_service"], signal.SIGKILL)
    until("not ready", 10, lambda: not served.is_ready())
    until("ready again", 60, served.is_ready)
    assert served.complete("The capital of France is") == first
    assert served.children()["http_facade"] == children["http_facade"]

    sessions += [served.session_of(pid) for pid in served.children().values()]
    served.process.send_signal(signal.SIGINT)
    assert served.finish() == 0
    left = [pid for session in sessions for pid in session if Path(f"/proc/{pid}").exists()]
    assert left == []


def test_bad_input_ends_at_once_with_a_clear_line(tmp_path: Path) -> None:
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            ((str(tmp_path / "none"), *ANY_PORTS), "There is no model directory"),
            ((str(tmp_path / "pickled"), *ANY_PORTS), "pickle checkpoint"),
            ((f"--port={port}",), f"Port {port} is in use; choose another with --port"),
            (("--prot=1",), "Did you mean --port?"),
            ((*ANY_PORTS, "--dtype=float8"), "--dtype"),
            ((*ANY_PORTS, "--port=-1"), "--port"),
        ]
        for number, (arguments, says) in enumerate(cases):
            serve = Serve(tmp_path / f"log{number}", *arguments)
            assert serve.finish() == 2, arguments
            assert says in serve.log.read_text()
            assert "Traceback" not in serve.log.read_text()


def test_the_help_lists_the_flags_of_both() -> None:
    command = [sys.executable, "-m", "clients", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for flag in ("--port", "--grpc-port", "--max-num-seqs", "--api-key", "--dtype"):
        assert f"  {flag} " in text
