"""The life of `serve`'s children, with small scripts in their places and real signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from clients.launch.child import Child
from clients.launch.supervisor import ChildPlan, RestartPolicy, Supervisor

# Runs a supervisor over two scripts; its own process, because it takes signals.
HARNESS = """
import asyncio, sys
sys.path.insert(0, sys.argv[3])
from test_cli_supervisor import supervise
sys.exit(asyncio.run(supervise(sys.argv[1], sys.argv[2])))
"""

CHILD = """
import json, os, signal, sys, time
terms = []
name, log, behaviour, arguments = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]
def note(what):
    with open(log, "a") as file:
        file.write(f"{name} {what}\\n")
def on_term(number, frame):
    note("term")
    terms.append(number)
    if behaviour == "stubborn" or behaviour == "busy" and len(terms) < 2:
        return
    time.sleep(0.2)
    note("end")
    sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
starts = open(log).read().count(f"{name} start") if os.path.exists(log) else 0
note(f"start {os.getpid()} {' '.join(arguments)}")
if behaviour == "bad-input":
    print("error: no such model", file=sys.stderr)
    sys.exit(2)
if behaviour == "always-crashes" and starts:
    sys.exit(7)
print("a line of no meaning")
if behaviour in ("loads-long", "loads-in-vain"):
    print(json.dumps({"event": "bound", "at": f"{name}:{starts}"}), flush=True)
    while "facade start" not in open(log).read():
        time.sleep(0.02)
if behaviour == "loads-in-vain":
    sys.exit(2)
print(json.dumps({"event": "listening", "at": f"{name}:{starts}"}), flush=True)
def until_announced():
    while not os.path.exists(log + ".announced"):
        time.sleep(0.02)
if behaviour in ("always-crashes", "crashes-once") and not starts:
    until_announced()
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == "drained":
    until_announced()
    sys.exit(0)
while True:
    time.sleep(0.05)
"""

POLICY = RestartPolicy(delays_seconds=(0.05, 0.05, 0.05), steady_seconds=60.0)


async def supervise(log: str, behaviours: str) -> int:
    engine_behaviour, facade_behaviour, *grace = behaviours.split(",")

    def plan(name: str, behaviour: str, *arguments: str) -> ChildPlan:
        command = [sys.executable, "-c", CHILD, name, log, behaviour, *arguments]
        return ChildPlan(
            name,
            command,
            pin=lambda where: [f"--pinned={where['at']}"],
            grace_seconds=float(grace[0]) if grace else 30.0,
        )

    def facade(engine_at: Mapping[str, str]) -> ChildPlan:
        return plan("facade", facade_behaviour, f"--engine={engine_at['at']}")

    async def announce(engine_at: Mapping[str, str], facade_at: Mapping[str, str]) -> None:
        print(f"both listen: {engine_at['at']} {facade_at['at']}", flush=True)
        open(log + ".announced", "w").close()  # noqa: ASYNC230

    return await Supervisor(plan("engine", engine_behaviour), facade, announce, POLICY).run()


class Run:
    def __init__(self, log: Path, behaviours: str) -> None:
        self.log = log
        here = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, "-c", HARNESS, str(log), behaviours, str(here)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(here.parents[1])},
        )

    def until_announced(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "both listen: engine:0 facade:0\n"

    def until_noted(self, line: str, count: int = 1) -> None:
        deadline = time.monotonic() + 30
        while self.notes().count(line) < count:
            assert time.monotonic() < deadline, self.notes()
            time.sleep(0.02)

    def notes(self) -> list[str]:
        """The log without pids and arguments."""
        return [" ".join(line.split()[:2]) for line in self.lines()]

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def pids(self) -> list[int]:
        return [int(line.split()[2]) for line in self.lines() if line.split()[1] == "start"]

    def finish(self) -> tuple[int, str]:
        """The exit code and stderr; no child may be left."""
        _, errors = self.process.communicate(timeout=60)
        assert_gone(self.pids())
        return self.process.returncode, errors


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    for pid in pids:
        while is_running(pid):
            assert time.monotonic() < deadline, f"{pid} is left"
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_signal_stops_the_facade_and_then_the_engine(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "good,good")
    run.until_announced()
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.finish()
    assert code == 0
    assert run.notes() == [
        *("engine start", "facade start"),
        *("facade term", "facade end", "engine term", "engine end"),
    ]
    assert "a line of no meaning" in errors  # what a child prints is not lost


def test_the_facade_is_told_where_the_engine_listens(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "good,good")
    run.until_announced()
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 0
    assert any(line.endswith("--engine=engine:0") for line in run.lines())


def test_a_stubborn_child_is_killed_after_its_grace(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "stubborn,good,0.5")
    run.until_announced()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 0


def test_a_second_signal_is_handed_on_so_that_children_say_their_last_words(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "log", "busy,busy")
    run.until_announced()
    run.process.send_signal(signal.SIGTERM)
    run.until_noted("facade term")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 1
    assert run.notes()[2:] == [
        *("facade term", "facade term", "facade end"),
        *("engine term", "engine term", "engine end"),
    ]


def test_after_a_second_signal_who_stays_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "stubborn,stubborn,90")
    run.until_announced()
    run.process.send_signal(signal.SIGINT)
    run.until_noted("facade term")
    began = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.finish()[0] == 1
    assert time.monotonic() - began < 40  # of a grace of 90 s


def test_a_signal_while_starting_leaves_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "good,good")
    run.until_noted("engine start")
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 0


def test_bad_input_ends_it_with_the_childs_code_and_message(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "bad-input,good")
    code, errors = run.finish()
    assert code == 2
    assert "error: no such model" in errors
    assert run.notes() == ["engine start"]


def test_the_facade_starts_while_the_engine_loads(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "loads-long,good")  # forever, if the facade did not start
    run.until_announced()
    run.process.send_signal(signal.SIGTERM)
    assert run.finish()[0] == 0
    assert any(line.endswith("--engine=engine:0") for line in run.lines())


def test_an_engine_that_fails_while_it_loads_ends_all_with_its_code(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "loads-in-vain,good")
    assert run.finish()[0] == 2
    assert run.notes() == ["engine start", "facade start", "facade term", "facade end"]


def test_a_facade_that_cannot_start_takes_the_engine_down(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "good,bad-input")
    assert run.finish()[0] == 2
    assert run.notes()[-1] == "engine end"


@pytest.mark.parametrize("behaviours", ["crashes-once,good", "good,crashes-once"])
def test_a_child_that_dies_is_started_again_where_it_listened(
    tmp_path: Path, behaviours: str
) -> None:
    name = "engine" if behaviours.startswith("crashes") else "facade"
    run = Run(tmp_path / "log", behaviours)
    run.until_announced()
    run.until_noted(f"{name} start", 2)
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.finish()
    assert code == 0
    assert f"{name} ended with exit code 137; starting it again" in errors
    starts = [line for line in run.lines() if line.startswith(f"{name} start")]
    assert starts[1].endswith(f"--pinned={name}:0")


def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "always-crashes,good")
    code, errors = run.finish()
    assert code == 7
    assert "keeps ending (exit code 7); giving up" in errors
    assert run.notes().count("engine start") == 1 + len(POLICY.delays_seconds)
    assert run.notes()[-1] == "facade end"


def test_a_child_that_ends_well_ends_all(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "drained,good")
    code, errors = run.finish()
    assert code == 0
    assert "engine was told to end" in errors
    assert run.notes().count("engine start") == 1
    assert run.notes()[-1] == "facade end"


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    run = Run(tmp_path / "log", "stubborn,good")
    run.until_announced()
    run.process.kill()
    run.process.wait()
    assert_gone(run.pids())
    assert run.process.stdout is not None
    assert run.process.stderr is not None
    run.process.stdout.close()
    run.process.stderr.close()


async def test_where_a_child_listens_is_what_it_printed(tmp_path: Path) -> None:
    event = json.dumps({"event": "listening", "grpc": "127.0.0.1:5", "model": "m"})
    child = await Child.start([sys.executable, "-c", f"print({event!r}, flush=True)"])
    assert await child.listening() == {"event": "listening", "grpc": "127.0.0.1:5", "model": "m"}
    assert await child.wait() == 0


async def test_where_a_child_will_listen_is_known_before_it_does() -> None:
    code = """
import sys
print('{"event": "bound", "at": 1}', flush=True)
sys.stdin.read() or sys.exit(3)
"""
    child = await Child.start([sys.executable, "-c", code])  # its stdin has ended
    assert await child.bound() == {"event": "bound", "at": "1"}
    assert await child.listening() is None
    assert child.ready_at is None
    assert await child.wait() == 3


async def test_a_child_that_ends_without_a_word_never_listened() -> None:
    child = await Child.start([sys.executable, "-c", "import sys; sys.exit(3)"])
    assert await asyncio.wait_for(child.listening(), 30) is None
    assert await child.bound() is None
    assert await child.wait() == 3
