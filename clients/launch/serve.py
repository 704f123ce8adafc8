"""`firsttoken serve [MODEL]`: what to start, with which flags, and what to tell the user."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from clients.launch.child import Where
from clients.launch.commands import module_command
from clients.launch.flags import Flag, ServeArguments, ServeFlags, UsageError, parse_flags
from clients.launch.ports import WantedPort, check_ports
from clients.launch.readiness import until_ready
from clients.launch.supervisor import ChildPlan, Supervisor

_USAGE = """\
usage: firsttoken serve [MODEL] [flags]

Start an engine and an HTTP facade in front of it, and keep both running until Ctrl-C.
MODEL is a local directory, the name of an imported model or a hub id; none: the embedded one."""

_OWNERS = ("engine_service", "http_facade")
_GRACE_MARGIN_SECONDS = 10.0  # beyond --shutdown-timeout, for flushing traces and leaving
_PRINT_FLAGS = "--print-flags"  # parses the other flags, then prints what there is
_API_KEY_VARIABLE = "FIRSTTOKEN_API_KEY"
_ENGINE_KEY_VARIABLE = "FIRSTTOKEN_ENGINE_API_KEY"  # the facade sends it, the engine trusts it


class StartError(Exception):
    """A part cannot be run as asked; the message is empty when the part said why itself."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def serve(arguments: Sequence[str]) -> int:
    """Returns the exit code: 2 for bad input, otherwise as `Supervisor.run` has it."""
    try:
        flags = _read_flags()
        if {"-h", "--help"} & {*arguments}:
            print(_USAGE)
            print(flags.help_text())
            return 0
        given = flags.split(arguments)
        _check_values(given)
        _check_tls(given)
        check_ports(_wanted_ports(given))
        _prepare_model(given.model)
    except UsageError as error:
        print(f"firsttoken: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        if str(error):
            print(f"firsttoken: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    if _has_keys(given):
        # The engine asks for keys, too, and lets this facade say for whom a request is.
        os.environ.setdefault(_ENGINE_KEY_VARIABLE, secrets.token_urlsafe(32))
    plans = _Plans(given)
    return asyncio.run(Supervisor(plans.engine(), plans.facade, plans.announce).run())


def _read_flags() -> ServeFlags:
    """Asks both owners at the same time: each is a Python start of its own."""
    asked = [(module, _start(module, _PRINT_FLAGS)) for module in _OWNERS]
    merged: list[list[Flag]] = []
    for module, process in asked:
        output, errors = process.communicate()
        try:
            if process.returncode != 0:
                raise ValueError(errors.strip().rpartition("\n")[2])
            merged.append(parse_flags(output))
        except ValueError as error:
            raise StartError(f"{module} does not tell its flags: {error}", 1) from error
    return ServeFlags(*merged)


def _check_values(given: ServeArguments) -> None:
    """Lets the owners parse what is theirs, before a model is loaded for nothing."""
    asked = [
        _start(module, *flags, _PRINT_FLAGS)
        for module, flags in zip(_OWNERS, (given.engine, given.facade), strict=True)
        if flags
    ]
    for process in asked:
        _, errors = process.communicate()
        if process.returncode != 0:
            raise StartError(errors.strip().rpartition("\n")[2], process.returncode)


def _check_tls(given: ServeArguments) -> None:
    if given.values.get("grpc_ssl_certfile") and not given.values.get("engine_ssl_ca"):
        raise UsageError(
            "--grpc-ssl-certfile takes --engine-ssl-ca, too: whom the facade trusts to have "
            "signed the engine's certificate."
        )


def _has_keys(given: ServeArguments) -> bool:
    flags = (given.values.get("api_key"), given.values.get("api_keys_file"))
    return any((*flags, os.environ.get(_API_KEY_VARIABLE)))


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    command = module_command(module, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _wanted_ports(given: ServeArguments) -> list[WantedPort]:
    owners = (
        ("--port", "port", "host"),
        ("--grpc-port", "grpc_port", "grpc_host"),
        ("--engine-metrics-port", "engine_metrics_port", "grpc_host"),
    )
    wanted = []
    for flag, port_dest, host_dest in owners:
        port = given.number(port_dest)
        if port is not None and port.is_integer() and 0 <= port < 65536:
            wanted.append(WantedPort(flag, given.values.get(host_dest, ""), int(port)))
    return wanted


def _prepare_model(model: str | None) -> None:
    """Checks it, imports or fetches it first when need be, with the progress on our stderr."""
    command = module_command("engine_service.model_store", "resolve", *([model] if model else []))
    code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code != 0:
        raise StartError("", code)  # it said why


@dataclass(frozen=True, slots=True)
class _Plans:
    given: ServeArguments

    def engine(self) -> ChildPlan:
        model = [self.given.model] if self.given.model else []
        return ChildPlan(
            name="engine",
            command=module_command("engine_service", *model, *self.given.engine),
            pin=_pin_engine,
            grace_seconds=self._grace_seconds(),
        )

    def facade(self, engine_at: Where) -> ChildPlan:
        engine = f"--engine={engine_at['grpc']}"
        return ChildPlan(
            name="facade",
            command=module_command("http_facade", engine, *self.given.facade),
            pin=_pin_facade,
            grace_seconds=self._grace_seconds(),
        )

    async def announce(self, engine_at: Where, facade_at: Where) -> None:
        await until_ready(facade_at["http"])
        print(announcement(engine_at, facade_at, _has_keys(self.given)), flush=True)

    def _grace_seconds(self) -> float:
        return (self.given.number("shutdown_timeout") or 0.0) + _GRACE_MARGIN_SECONDS


def announcement(engine_at: Where, facade_at: Where, has_key: bool) -> str:
    """Where everything listens, and a line to paste."""
    http, model = facade_at["http"], engine_at["model"]
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": model, "messages": [question], "stream": True})
    key = f'-H "Authorization: Bearer ${_API_KEY_VARIABLE}" ' if has_key else ""
    return f"""\
Serving {model}
  HTTP (OpenAI API)  {http}/v1
  gRPC               {engine_at["grpc"]}
  engine metrics     http://{engine_at["metrics"]}/metrics
Try it:
  curl -N {http}/v1/chat/completions {key}-H 'Content-Type: application/json' -d {shlex.quote(body)}
Ctrl-C stops it."""


def _pin_engine(where: Where) -> list[str]:
    """A restarted engine must listen where the facade and the scrapers know it."""
    return [
        f"--grpc-port={where['grpc'].rpartition(':')[2]}",
        f"--engine-metrics-port={where['metrics'].rpartition(':')[2]}",
    ]


def _pin_facade(where: Where) -> list[str]:
    return [f"--port={where['http'].rpartition(':')[2]}"]
