"""The command line, `firsttoken`.

Each sub-command runs a module of its own package as a process, because the client library may
import neither engine nor facade; and importing this file costs next to nothing.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence

from clients.launch.commands import module_command

_USAGE = """\
usage: firsttoken COMMAND [arguments]

  serve [MODEL]              engine and HTTP facade, supervised, until Ctrl-C
  engine [MODEL]             the engine alone (gRPC)
  facade --engine HOST:PORT  an HTTP facade alone, in front of a running engine
  models                     the imported models and where they lie
  keys new                   makes an API key, and its entry for the keys file
  control flush|drain --engine HOST:PORT  forget cached prefixes, or let the engine finish and end
  ttft [ID]                  where the time to a first token went, of one trace or of many
  bench --url URL | --grpc HOST:PORT      load a server and say how it did; compare, sweep

`firsttoken COMMAND --help` lists the flags; `firsttoken --version` prints the version."""

# What replaces this process: module, then leading arguments.
_MODULES: dict[str, tuple[str, ...]] = {
    "engine": ("engine_service",),
    "facade": ("http_facade",),
    "keys": ("access.new_key",),
    "models": ("engine_service.model_store", "list"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    command, *rest = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if command in ("-h", "--help", "help"):
        print(_USAGE)
        return 0
    if command == "--version":
        print(f"firsttoken {_version()}")
        return 0
    if command == "serve":
        from clients.launch.serve import serve  # asyncio and more, which the others do not need

        return serve(rest)
    if command == "control":
        from clients.control import control  # gRPC

        return control(rest)
    if command == "ttft":
        from traces.explain.command import ttft

        return ttft(rest)
    if command == "bench":
        return _bench(rest)
    if command in _MODULES:
        replacement = module_command(*_MODULES[command], *rest)
        os.execv(replacement[0], replacement)
    close = difflib.get_close_matches(
        command, ["serve", "control", "bench", "ttft", *_MODULES], n=1
    )
    hint = f" Did you mean {close[0]}?" if close else ""
    print(f"firsttoken: there is no command {command}.{hint}\n\n{_USAGE}", file=sys.stderr)
    return 2


def _bench(arguments: Sequence[str]) -> int:
    try:
        from clients.bench.command import bench  # brings an HTTP client, which the base has not
    except ModuleNotFoundError as error:
        print(f"firsttoken bench needs firsttoken[facade]: no {error.name}", file=sys.stderr)
        return 2
    return bench(arguments)


def _version() -> str:
    from importlib.metadata import version  # slow to import

    return version("firsttoken")


if __name__ == "__main__":
    sys.exit(main())
