"""Compiling grammars off the step loop: one thread, those that wait in order, one queue out.

A bad schema comes back as a Failure, never as an exception; the compiler lets go of the
interpreter lock, so that steps go on meanwhile.

xgrammar is loaded by that thread when the first grammar is asked for: it imports transformers,
and that takes a second and some 50 MB that a start without grammars has no use for.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from engine_service.errors import InternalError, InvalidRequest
from engine_service.grammar_vocabulary import read_tokenizer_info
from engine_service.messages import Failure, StructuredOutput
from engine_service.schema_check import check_schema
from engine_service.schema_error import FIELD

if TYPE_CHECKING:
    import xgrammar

_ANY_OBJECT: Final = '{"type": "object"}'
_LOCATION = re.compile(r"^\[[\d:]+\]\s*\S+:\d+:\s*(Check failed: \(.*?\) is false:\s*)?")
_MAX_REASON_CHARS: Final = 200

_log = logging.getLogger(__name__)

Compilation = tuple[StructuredOutput, "xgrammar.CompiledGrammar | Failure"]


class GrammarCompiler:
    """All methods are called by one thread; `on_ready` by the compiling one."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        on_ready: Callable[[], None],
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._compiler: xgrammar.GrammarCompiler | None = None  # the thread's own, from its first
        self._on_ready = on_ready
        self._waiting: dict[StructuredOutput, None] = {}  # in order; guarded by the condition
        self._has_work = threading.Condition()
        self._finished: SimpleQueue[Compilation] = SimpleQueue()
        # A daemon: a grammar that still compiles must not hold the process.
        threading.Thread(target=self._run, name="grammar-compiler", daemon=True).start()

    def start(self, spec: StructuredOutput) -> None:
        """`take_finished` will have it once, unless it is cancelled before it has begun."""
        with self._has_work:
            self._waiting[spec] = None
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

    def _run(self) -> None:
        while True:
            spec = self._next()
            self._finished.put((spec, self._compile(spec)))
            self._on_ready()

    def _next(self) -> StructuredOutput:
        with self._has_work:
            self._has_work.wait_for(lambda: self._waiting)
            spec = next(iter(self._waiting))
            del self._waiting[spec]
            return spec

    def _compile(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar | Failure:
        try:
            if spec.kind == "json_object":
                return self._compile_schema(_ANY_OBJECT)
            if spec.kind == "json_schema":
                check_schema(spec.source)
                return self._compile_schema(spec.source)
        except InvalidRequest as error:
            return Failure(error.reason, error.message, error.field)
        except Exception:
            _log.exception("a grammar of kind %s failed to compile", spec.kind)
            return Failure(InternalError.reason, "The grammar could not be compiled.", FIELD)
        return Failure(
            InvalidRequest.reason,
            f"The kind of grammar {spec.kind!r} is not supported.",
            "structured_output",
        )

    def _compile_schema(self, schema: str) -> xgrammar.CompiledGrammar:
        if self._compiler is None:
            self._compiler = self._load()
        try:
            return self._compiler.compile_json_schema(schema, any_whitespace=False)
        except RuntimeError as error:  # all that xgrammar raises for a schema it cannot take
            raise InvalidRequest(_reason(str(error)), field=FIELD) from error

    def _load(self) -> xgrammar.GrammarCompiler:
        import xgrammar

        tokenizer = read_tokenizer_info(self._model_dir, self._vocab_size, self._eos_token_ids)
        return xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)


def _reason(message: str) -> str:
    """xgrammar's message without the place in its sources."""
    lines = _LOCATION.sub("", message.strip()).splitlines() or [""]
    reason = lines[0].strip()
    if not reason or "call is<type>() before get<type>()" in reason:
        reason = "a keyword has a value of the wrong type"
    return reason[:_MAX_REASON_CHARS]
