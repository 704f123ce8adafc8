"""Compiles the C++ kernels into the user's cache, once for each version of source and compiler.

    python -m kernels.cpu.build                   does it now, and not at the first start
    <cache>/kernels/<key>/libfirsttoken.so        key: SHA-256 of sources, flags and compiler

The package carries sources only, so that one wheel fits every machine. Of two processes that
start at once the second waits for the first one's library.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_log = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent / "csrc"
_LIBRARY_NAME = "libfirsttoken.so"
# No contraction: a * b + c must not be rounded once in one kernel and twice in another.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fvisibility=default", "-Wall")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_FORM_FLAGS = {
    # GCC 12 warns of its own header's deliberately undefined registers.
    "avx512": (
        *_AVX2_FLAGS,
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
        "-Wno-maybe-uninitialized",
    ),
    "avx2": _AVX2_FLAGS,
    # It passes vectors by value only where they are inlined.
    "portable": ("-Wno-psabi",),
}
# What a processor must have, as Linux names it.
_FORM_FEATURES = {
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"},
    "avx2": {"avx2", "fma", "f16c"},
}


class KernelBuildError(Exception):
    """No compiler, or one that fails; the message says what to install or what it said."""


@cache
def machine_forms() -> tuple[str, ...]:
    """The forms that this machine runs, the fastest first: `avx512`, `avx2`, `portable`."""
    features = _processor_features()
    vector_forms = [form for form, needed in _FORM_FEATURES.items() if needed <= features]
    return (*vector_forms, "portable")


def machine_form() -> str:
    return machine_forms()[0]


def _processor_features() -> set[str]:
    if platform.machine() not in ("x86_64", "AMD64"):
        return set()
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    flags = next((line for line in cpuinfo.splitlines() if line.startswith("flags")), "")
    return set(flags.split())


def build_library(form: str) -> Path:
    """Where the compiled library of a form lies; compiles it if need be, some seconds.

    Raises KernelBuildError.
    """
    compiler = os.environ.get("CXX", "g++")
    sources = sorted(_SOURCE_DIR.glob("*.cpp"))
    flags = (*_FLAGS, *_FORM_FLAGS[form])
    directory = _cache_dir() / "kernels" / _key(compiler, flags)
    library = directory / _LIBRARY_NAME
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _log.info("compiling the CPU kernels (%s), once for this machine", form)
            start = time.monotonic()
            _compile(compiler, flags, sources, library)
            _log.info("compiled the CPU kernels in %.0f s", time.monotonic() - start)
    return library


def _cache_dir() -> Path:
    """As `engine_service.model_store` has it."""
    if own := os.environ.get("FIRSTTOKEN_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "firsttoken"


def _key(compiler: str, flags: tuple[str, ...]) -> str:
    sha = hashlib.sha256()
    sha.update("\0".join((_version(compiler), *flags)).encode())
    for path in sorted(_SOURCE_DIR.iterdir()):
        sha.update(path.name.encode() + b"\0" + path.read_bytes())
    return sha.hexdigest()[:24]


def _version(compiler: str) -> str:
    return _run([compiler, "--version"])


def _compile(compiler: str, flags: tuple[str, ...], sources: list[Path], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        objects = [Path(scratch) / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            jobs = zip(sources, objects, strict=True)
            commands = [[compiler, *flags, "-c", str(s), "-o", str(o)] for s, o in jobs]
            list(pool.map(_run, commands))
        linked = Path(scratch) / _LIBRARY_NAME
        _run(
            [
                compiler,
                "-shared",
                "-pthread",
                "-Wl,--no-undefined",
                *map(str, objects),
                "-o",
                str(linked),
            ]
        )
        linked.rename(library)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise KernelBuildError(
            f"The CPU kernels need a C++ compiler, and {command[0]!r} is not one that runs here. "
            "On Debian or Ubuntu: sudo apt-get install g++"
        ) from error
    except subprocess.CalledProcessError as error:
        raise KernelBuildError(
            f"{' '.join(command)} failed:\n{error.stderr.strip()[-4000:]}"
        ) from error
    return done.stdout


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        build_library(machine_form())
    except KernelBuildError as error:
        _log.warning("%s\nUntil then the reference kernels compute, several times slower.", error)


if __name__ == "__main__":
    main()
