"""The grammar process: compiles sources that nobody vouches for, each in a child of its own.

    python -m engine_service.grammar_process --fd N --config JSON

    core <--- one frame a grammar, each way ---> grammar process --- fork ---> child, ends with it

The process itself only loads xgrammar and the vocabulary, once, and forks. So what a source does
to its compiler (loops, eats memory, overflows the stack) ends one child, and with that one
request; the next child is there in milliseconds. A child has a limit on processor time and on
memory, both kept by the kernel.

Steps come first: a child runs only where the processor is idle. On a machine whose processors are
never idle it would wait for ever; so one that has waited long is replaced by a child that has a low
priority instead, which takes its turns among others.

It ends when the core's end of the socket is closed, or by SIGKILL when the core dies.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from engine_service.cpu_policy import give_way_to_all, lower_priority
from engine_service.grammar_compile import BadGrammar, compile_source
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

_PR_SET_PDEATHSIG: Final = 1
_EXIT_OUT_OF_MEMORY: Final = 9
_PATIENCE_SECONDS: Final = 10.0  # twice what a grammar takes beside four streams on two processors


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_service.grammar_process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--config", required=True)
    arguments = parser.parse_args()

    config = msgspec.json.decode(arguments.config, type=GrammarProcessConfig)
    _die_with(config.core_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lower_priority()
    core = socket.socket(fileno=arguments.fd)
    sources = msgspec.msgpack.Decoder(StructuredOutput)
    compiler = _load(config)
    while (spec := receive(core, sources)) is not None:
        send_payload(core, _compile(compiler, spec, config))
    return 0


def _load(config: GrammarProcessConfig) -> xgrammar.GrammarCompiler:
    import xgrammar

    tokenizer = read_tokenizer_info(Path(config.model_dir), config.vocab_size, config.eos_token_ids)
    # No threads of its own: they would not survive the fork.
    return xgrammar.GrammarCompiler(tokenizer, max_threads=1, cache_enabled=False)


def _compile(
    compiler: xgrammar.GrammarCompiler, spec: StructuredOutput, config: GrammarProcessConfig
) -> bytes:
    """The payload of a Compiled or a CompileFailed."""
    try:
        return _compile_in_child(compiler, spec, config, patience_seconds=_PATIENCE_SECONDS)
    except TimeoutError:
        return _compile_in_child(compiler, spec, config, patience_seconds=None)


def _compile_in_child(
    compiler: xgrammar.GrammarCompiler,
    spec: StructuredOutput,
    config: GrammarProcessConfig,
    patience_seconds: float | None,
) -> bytes:
    """`patience_seconds`: for so long the child gives way to all; then this raises TimeoutError."""
    read_fd, write_fd = os.pipe()
    own_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _die_with(own_pid)
        os.close(read_fd)
        if patience_seconds is not None:
            give_way_to_all()
        os._exit(_child(compiler, spec, config, write_fd))
    os.close(write_fd)
    with open(read_fd, "rb") as pipe:
        has_answer = bool(select.select([pipe], [], [], patience_seconds)[0])  # None: as it takes
        if not has_answer:
            os.kill(pid, signal.SIGKILL)
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not has_answer:
        raise TimeoutError
    exit_code = os.waitstatus_to_exitcode(status)
    return answer if exit_code == 0 else encode(CompileFailed(_failure_kind(exit_code)))


def _failure_kind(exit_code: int) -> FailureKind:
    if exit_code == -signal.SIGPROF:
        return FailureKind.OUT_OF_TIME
    if exit_code in (_EXIT_OUT_OF_MEMORY, -signal.SIGABRT):  # C++ aborts when it gets none
        return FailureKind.OUT_OF_MEMORY
    return FailureKind.DIED


def _child(
    compiler: xgrammar.GrammarCompiler,
    spec: StructuredOutput,
    config: GrammarProcessConfig,
    fd: int,
) -> int:
    """Writes its answer; returns its exit code."""
    try:
        _limit(config)
        answer: Compiled | CompileFailed
        try:
            answer = Compiled(compile_source(compiler, spec))
        except BadGrammar as error:
            answer = CompileFailed(FailureKind.BAD_SOURCE, str(error))
        with open(fd, "wb") as pipe:
            pipe.write(encode(answer))
    except MemoryError:
        return _EXIT_OUT_OF_MEMORY
    except Exception as error:  # nothing may unwind into the loop of the process it was forked from
        print(f"compiling a grammar of kind {spec.kind}: {error!r}", file=sys.stderr, flush=True)
        return 1
    return 0


def _limit(config: GrammarProcessConfig) -> None:
    # By default the signal kills, whatever native code is at. The clock stands still while others
    # have the processor: on a busy machine a grammar takes longer, and no less is allowed.
    signal.setitimer(signal.ITIMER_PROF, config.max_cpu_seconds)
    limit = _address_space_bytes() + config.max_memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space_bytes() -> int:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    return num_pages * resource.getpagesize()


def _die_with(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
