"""The grammar process against sources that mean harm, and against its own death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_service.config import GrammarConfig
from engine_service.errors import EngineError, InternalError, InvalidRequest
from engine_service.grammar_worker import GrammarWorker
from engine_service.messages import GrammarKind, StructuredOutput

VOCAB = 49152
EOS = (2,)
SLOW = "root ::= " + " ".join(["x?"] * 1000) + "\nx ::= [a-z]*"  # for seconds, left alone
LARGE = "root ::= [a-z]{0,30000}"


def new_worker(model_dir: Path, limits: GrammarConfig) -> GrammarWorker:
    return GrammarWorker(model_dir, VOCAB, EOS, limits)


@pytest.fixture(scope="module")
def worker(embedded_model_dir: Path) -> Iterator[GrammarWorker]:
    worker = new_worker(embedded_model_dir, GrammarConfig(compile_timeout_seconds=0.5))
    worker.prepare()
    yield worker
    worker.close()


def refusal(worker: GrammarWorker, kind: GrammarKind, source: str) -> EngineError:
    with pytest.raises(EngineError) as refused:
        worker.compile(StructuredOutput(kind, source))
    return refused.value


def compiles(worker: GrammarWorker) -> bool:
    return worker.compile(StructuredOutput("regex", "[0-9]+")).memory_size_bytes > 0


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("grammar", SLOW, "takes too long to compile"),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "maximum limit"),
        ("grammar", "root ::= other", "not defined"),
        ("grammar", 'x ::= "a"', "root"),
        ("regex", "(" * 4000 + "a" + ")" * 4000, ""),
        ("regex", "(?=a)b", "Lookahead"),
        ("json_schema", '{"items":' * 5000 + "{}" + "}" * 5000, ""),
        ("json_schema", '{"properties": {"a": 7}}', ""),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "tag"}}', ""),
    ],
)
def test_a_source_that_means_harm_is_refused_in_time(
    worker: GrammarWorker, kind: GrammarKind, source: str, why: str
) -> None:
    pid = worker.pid
    start = time.monotonic()
    error = refusal(worker, kind, source)
    assert time.monotonic() - start < 40  # of the clock; 0.5 of a processor
    assert isinstance(error, InvalidRequest)
    assert error.field == f"structured_output.{kind}"
    assert why in error.message
    assert ".cc" not in error.message
    assert compiles(worker)
    assert worker.pid == pid


@pytest.mark.slow
def test_processors_that_others_never_leave_delay_a_grammar_but_not_for_ever(
    embedded_model_dir: Path,
) -> None:
    worker = new_worker(embedded_model_dir, GrammarConfig())
    worker.prepare()
    assert compiles(worker)
    loop = (sys.executable, "-c", "while True: pass")
    others = [subprocess.Popen(loop) for _ in os.sched_getaffinity(0)]
    try:
        start = time.monotonic()
        assert worker.compile(StructuredOutput("regex", "[a-z]{1,4000}")).memory_size_bytes > 0
        assert time.monotonic() - start < 60  # alone: a second
    finally:
        for other in others:
            other.kill()
            other.wait()
        worker.close()


def test_a_source_gets_so_much_memory(embedded_model_dir: Path) -> None:
    worker = new_worker(embedded_model_dir, GrammarConfig(60.0, compile_memory_bytes=1024**2))
    try:
        error = refusal(worker, "grammar", LARGE)
        assert error.message == "takes too much memory to compile"
        assert compiles(worker)
    finally:
        worker.close()


def test_a_process_that_died_is_replaced(worker: GrammarWorker) -> None:
    assert compiles(worker)
    os.kill(worker.pid, signal.SIGKILL)
    time.sleep(0.1)
    assert compiles(worker)  # a new one, started for it

    os.kill(worker.pid, signal.SIGSTOP)  # it takes the source, and dies at it
    killing = subprocess.Popen(["sh", "-c", f"sleep 2.5; kill -9 {worker.pid}"])
    assert isinstance(refusal(worker, "regex", "a"), InternalError)
    killing.wait()
    assert compiles(worker)


def test_it_dies_with_the_core(embedded_model_dir: Path) -> None:
    core = f"""
import os, signal
from pathlib import Path
from engine_service.config import GrammarConfig
from engine_service.grammar_worker import GrammarWorker
worker = GrammarWorker(Path({str(embedded_model_dir)!r}), {VOCAB}, {EOS}, GrammarConfig())
worker.prepare()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    answer = subprocess.run([sys.executable, "-c", core], stdout=subprocess.PIPE, text=True)
    assert answer.returncode == -signal.SIGKILL
    _wait_for_end(int(answer.stdout))


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 30
    while Path(f"/proc/{pid}").exists():
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # dead, and nobody here to bury it
            return
        assert time.monotonic() < deadline, "the grammar process outlives its core"
        time.sleep(0.01)
