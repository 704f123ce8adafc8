"""Compiling grammars off the step loop: one thread, those that wait in order, one queue out.

A process compiles (`grammar_process.py`), so that no source can take the core's time, memory or
life; the thread waits for it, and reads what it made. A bad one comes back as a Failure, never as
an exception. Both yield to the step loop, which needs the processors more.

Nothing is loaded before the first grammar, or a moment of leisure (`prepare`): xgrammar imports
transformers, which takes a second and some 50 MB here, and 250 MB in the process.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final, Protocol

from engine_service.cpu_policy import lower_priority
from engine_service.errors import InternalError, InvalidRequest
from engine_service.messages import Failure, StructuredOutput

if TYPE_CHECKING:
    import xgrammar

_CLOSE_SECONDS: Final = 2.0

_log = logging.getLogger(__name__)

Compilation = tuple[StructuredOutput, "xgrammar.CompiledGrammar | Failure"]


class Worker(Protocol):
    """What the compiling thread needs of a GrammarWorker."""

    def prepare(self) -> None: ...

    def compile(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar: ...

    def close(self) -> None: ...


class GrammarCompiler:
    """All methods are called by one thread; `on_ready` and the worker's by the compiling one."""

    def __init__(self, worker: Worker, on_ready: Callable[[], None]) -> None:
        self._worker = worker
        self._on_ready = on_ready
        self._waiting: dict[StructuredOutput, None] = {}  # in order; guarded by the condition
        self._prepare = False  # guarded too
        self._closed = False
        self._has_work = threading.Condition()
        self._finished: SimpleQueue[Compilation] = SimpleQueue()
        self._times_ns: SimpleQueue[int] = SimpleQueue()
        # A daemon: a grammar that still compiles must not hold the process.
        self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
        self._thread.start()

    def start(self, spec: StructuredOutput) -> None:
        """`take_finished` will have it once, unless it is cancelled before it has begun."""
        with self._has_work:
            self._waiting[spec] = None
            self._has_work.notify()

    def prepare(self) -> None:
        """Loads what the first grammar would wait for, in the background."""
        with self._has_work:
            self._prepare = True
            self._has_work.notify()

    def cancel(self, spec: StructuredOutput) -> bool:
        """True: it had not begun, and never will. False: it will come out of `take_finished`."""
        with self._has_work:
            if spec not in self._waiting:
                return False
            del self._waiting[spec]
            return True

    def take_finished(self) -> list[Compilation]:
        finished: list[Compilation] = []
        while True:
            try:
                finished.append(self._finished.get_nowait())
            except Empty:
                return finished

    def take_times_ns(self) -> list[int]:
        """How long each compilation took that ended since the last call, bad grammars included."""
        times_ns: list[int] = []
        while not self._times_ns.empty():
            times_ns.append(self._times_ns.get_nowait())
        return times_ns

    def close(self) -> None:
        """Ends thread and process; what waits is never compiled."""
        with self._has_work:
            self._closed = True
            self._has_work.notify()
        self._worker.close()
        # Native code that reads a grammar would abort a process which ends meanwhile.
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        lower_priority()  # not less: it may hold what the steps wait for
        while not self._closed:
            spec = self._next()
            if spec is not None:
                began_ns = time.monotonic_ns()
                result = self._compile(spec)
                self._times_ns.put(time.monotonic_ns() - began_ns)
                self._finished.put((spec, result))
                self._on_ready()
            elif not self._closed:
                self._prepare_now()

    def _next(self) -> StructuredOutput | None:
        """None: there is something else to do."""
        with self._has_work:
            self._has_work.wait_for(lambda: self._waiting or self._prepare or self._closed)
            self._prepare = False  # compiling does it, too
            if not self._waiting or self._closed:
                return None
            spec = next(iter(self._waiting))
            del self._waiting[spec]
            return spec

    def _prepare_now(self) -> None:
        try:
            self._worker.prepare()
        except Exception:  # the first grammar will try again, and tell whoever wants it
            _log.exception("grammars can't be compiled")

    def _compile(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar | Failure:
        try:
            return self._worker.compile(spec)
        except InvalidRequest as error:
            return Failure(error.reason, error.message, error.field)
        except Exception:
            if not self._closed:
                _log.exception("a grammar of kind %s failed to compile", spec.kind)
            reason = InternalError.reason
            return Failure(reason, "The grammar could not be compiled.", spec.field)
