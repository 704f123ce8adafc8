"""The compiling thread: order, cancelling, and what becomes of a worker's errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from engine_service.errors import InvalidRequest
from engine_service.grammar_compiler import Compilation, GrammarCompiler
from engine_service.messages import Failure, StructuredOutput

if TYPE_CHECKING:
    import xgrammar


class RefusingWorker:
    """Refuses each source, once it may go on; so no grammar is needed."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        self.prepared = threading.Event()
        self.closed = threading.Event()
        self.error: Exception = InvalidRequest("is bad", field="structured_output.regex")

    def prepare(self) -> None:
        self.prepared.set()
        raise self.error

    def compile(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar:
        self.begun.append(spec.source)
        assert self.go_on.wait(20)
        raise self.error

    def close(self) -> None:
        self.closed.set()


def regex(source: str) -> StructuredOutput:
    return StructuredOutput("regex", source)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def finished(compiler: GrammarCompiler, number: int) -> list[Compilation]:
    taken: list[Compilation] = []

    def all_taken() -> bool:
        taken.extend(compiler.take_finished())
        return len(taken) >= number

    wait_until(all_taken)
    return taken


def test_what_nobody_awaits_any_more_is_not_compiled() -> None:
    worker, news = RefusingWorker(), threading.Event()
    compiler = GrammarCompiler(worker, news.set)
    for source in "abcd":
        compiler.start(regex(source))
    wait_until(lambda: worker.begun == ["a"])
    assert not compiler.cancel(regex("a"))  # it has begun
    assert compiler.cancel(regex("b"))
    assert not compiler.cancel(regex("b"))
    assert compiler.cancel(regex("c"))
    compiler.start(regex("c"))  # again, behind the others
    worker.go_on.set()
    assert [spec.source for spec, _ in finished(compiler, 3)] == ["a", "d", "c"]
    assert news.is_set()
    assert worker.begun == ["a", "d", "c"]
    compiler.close()


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (
            InvalidRequest("is bad", field="structured_output.regex"),
            Failure("INVALID_VALUE", "is bad", "structured_output.regex"),
        ),
        (
            RuntimeError("/a/path.cc:7"),
            Failure(
                "INTERNAL_ERROR", "The grammar could not be compiled.", "structured_output.regex"
            ),
        ),
    ],
)
def test_an_error_is_the_failure_of_its_source_alone(error: Exception, failure: Failure) -> None:
    worker = RefusingWorker()
    worker.error = error
    worker.go_on.set()
    compiler = GrammarCompiler(worker, lambda: None)
    compiler.prepare()
    assert worker.prepared.wait(20)
    for source in "ab":
        compiler.start(regex(source))
        assert finished(compiler, 1) == [(regex(source), failure)]
    compiler.close()
    assert worker.closed.is_set()
