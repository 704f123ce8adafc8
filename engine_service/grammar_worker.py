"""The core's side of the grammar process: sources out, compiled grammars in, a new one if it dies.

Compiled grammars come back in xgrammar's serialized form; reading one takes about a tenth of the
time that compiling it took, and leaves the interpreter lock alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from engine_service.config import GrammarConfig
from engine_service.errors import InternalError, InvalidRequest
from engine_service.grammar_frames import (
    Compiled,
    CompileFailed,
    FailureKind,
    GrammarProcessConfig,
    encode,
    receive,
    send_payload,
)
from engine_service.grammar_vocabulary import read_tokenizer_info
from engine_service.messages import StructuredOutput

if TYPE_CHECKING:
    import xgrammar

_MODULE: Final = "engine_service.grammar_process"
_STDERR_FD: Final = 2
# What one compilation may take by the clock, in units of what it may take of a processor: it runs
# at low priority, and longer where others are busy.
_WALL_PER_CPU: Final = 20.0
_START_SECONDS: Final = 60.0  # of the process, beside a busy machine

_ANSWERS: Final = msgspec.msgpack.Decoder(Compiled | CompileFailed)

_log = logging.getLogger(__name__)


class GrammarWorker:
    """Used by one thread, which must outlive the process: the kernel ends that with its parent
    thread. `close` may be called by any."""

    def __init__(
        self,
        model_dir: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        limits: GrammarConfig,
    ) -> None:
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._limits = limits
        self._tokenizer: xgrammar.TokenizerInfo | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none."""
        return 0 if self._process is None else self._process.pid

    def prepare(self) -> None:
        """What the first compilation would wait for: about three seconds, if not done before."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        if self._tokenizer is None:  # while the process loads the same
            self._tokenizer = read_tokenizer_info(
                self._model_dir, self._vocab_size, self._eos_token_ids
            )

    def compile(self, spec: StructuredOutput) -> xgrammar.CompiledGrammar:
        """Raises InvalidRequest for what is at fault itself, else InternalError or ModelError."""
        self.prepare()
        answer = self._ask(spec)
        if isinstance(answer, CompileFailed):
            raise _refusal(spec, answer)
        return self._read(answer)

    def close(self) -> None:
        self._closed = True
        self._end()

    def _read(self, answer: Compiled) -> xgrammar.CompiledGrammar:
        from xgrammar import CompiledGrammar

        if self._tokenizer is None:
            raise InternalError("The vocabulary is not loaded.")
        return CompiledGrammar.deserialize_json(answer.grammar, self._tokenizer)

    def _ask(self, spec: StructuredOutput) -> Compiled | CompileFailed:
        if self._socket is None:
            raise InternalError("The grammar process is gone.")
        answer: Compiled | CompileFailed | None
        try:
            send_payload(self._socket, encode(spec))
            answer = receive(self._socket, _ANSWERS)
        except TimeoutError:
            answer = CompileFailed(FailureKind.OUT_OF_TIME)
            self._end()
        except OSError:
            answer = None
        if answer is None:
            self._end()
            raise InternalError("The grammar process died.")
        return answer

    def _start(self) -> None:
        self._end()
        if self._closed:
            raise InternalError("The engine core ends.")
        config = GrammarProcessConfig(
            core_pid=os.getpid(),
            model_dir=str(self._model_dir),
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
            max_cpu_seconds=self._limits.compile_timeout_seconds,
            max_memory_bytes=self._limits.compile_memory_bytes,
        )
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                (
                    sys.executable,
                    "-m",
                    _MODULE,
                    f"--fd={theirs.fileno()}",
                    f"--config={msgspec.json.encode(config).decode()}",
                ),
                stdin=subprocess.DEVNULL,
                stdout=_STDERR_FD,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
            )
        ours.settimeout(_START_SECONDS + _WALL_PER_CPU * self._limits.compile_timeout_seconds)
        self._socket = ours

    def _end(self) -> None:
        process, self._process = self._process, None
        ours, self._socket = self._socket, None
        if ours is not None:
            with contextlib.suppress(OSError):
                ours.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer
            ours.close()
        if process is not None:
            process.kill()
            process.wait()


def _refusal(spec: StructuredOutput, failed: CompileFailed) -> InvalidRequest | InternalError:
    field = spec.field
    match failed.kind:
        case FailureKind.BAD_SOURCE:
            return InvalidRequest(failed.message, field=field)
        case FailureKind.OUT_OF_TIME:
            return InvalidRequest("takes too long to compile", field=field)
        case FailureKind.OUT_OF_MEMORY:
            return InvalidRequest("takes too much memory to compile", field=field)
        case FailureKind.DIED:
            _log.error("compiling a grammar of kind %s ended its process", spec.kind)
            return InvalidRequest("can't be compiled", field=field)
