"""Flags have one owner each: engine and facade print theirs, `serve` only hands them on.

    firsttoken serve [MODEL] --max-num-seqs 8 --port 9000 --log-level debug
                                    engine^    facade^          both^

So a new flag of the engine works under `serve` without a word here.
"""

from __future__ import annotations

import difflib
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

ENGINE, FACADE = "engine", "facade"

# Set by `serve` itself, or without meaning under it.
_NOT_UNDER_SERVE = {
    *("--engine", "--print-flags", "--help"),
    *("--engine-api-key", "--trusted-api-key"),  # a secret between the two that `serve` makes
}
_GRPC = "--grpc-"


class UsageError(Exception):
    """The command line is wrong; the message says how and what to write."""


@dataclass(frozen=True, slots=True)
class Flag:
    names: tuple[str, ...]  # spellings, the long one among them
    dest: str
    takes_value: bool
    default: str  # as text; empty for none
    help: str


@dataclass(frozen=True, slots=True)
class ServeArguments:
    model: str | None
    engine: tuple[str, ...]
    facade: tuple[str, ...]
    values: Mapping[str, str]  # by dest: what was given, else the owner's default

    def number(self, dest: str) -> float | None:
        """None when the flag is unknown or not a number; its owner refuses it on start."""
        try:
            return float(self.values.get(dest, ""))
        except ValueError:
            return None


def parse_flags(text: str) -> list[Flag]:
    """Reads what `--print-flags` printed; raises ValueError when it is something else."""
    entries: object = json.loads(text)
    if not isinstance(entries, list):
        raise ValueError("not a list of flags")
    return [_flag(entry) for entry in entries]


def _flag(entry: object) -> Flag:
    if not isinstance(entry, dict) or not isinstance(entry.get("flags"), list):
        raise ValueError(f"not a flag: {entry}")
    default = entry.get("default")
    return Flag(
        names=tuple(str(name) for name in entry["flags"]),
        dest=str(entry.get("dest", "")),
        takes_value=entry.get("takes_value") is True,
        default="" if default is None else str(default),
        help=str(entry.get("help") or ""),
    )


class ServeFlags:
    """The flags of both owners, merged."""

    def __init__(self, engine: Iterable[Flag], facade: Iterable[Flag]) -> None:
        self._by_owner = {ENGINE: _under_serve(engine), FACADE: _under_serve(facade)}
        self._known: dict[str, list[tuple[str, Flag]]] = {}
        for owner, flags in self._by_owner.items():
            for flag in flags:
                for name in flag.names:
                    self._known.setdefault(name, []).append((owner, flag))

    def split(self, arguments: Sequence[str]) -> ServeArguments:
        """Deals the arguments out to their owners; raises `UsageError`."""
        model: str | None = None
        given: dict[str, list[str]] = {ENGINE: [], FACADE: []}
        values = {flag.dest: flag.default for flags in self._by_owner.values() for flag in flags}
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            if not argument.startswith("-"):
                if model is not None:
                    raise UsageError(f"One MODEL is served, but {model} and {argument} are given.")
                model = argument
                continue
            name, has_value, value = argument.partition("=")
            owners = self._owners(name)
            takes_value = owners[0][1].takes_value
            if takes_value and not has_value:
                if not rest:
                    raise UsageError(f"{name} needs a value.")
                value = rest.pop(0)
            if has_value and not takes_value:
                raise UsageError(f"{name} takes no value.")
            for owner, flag in owners:
                given[owner].append(f"{name}={value}" if takes_value else name)
                values[flag.dest] = value
        return ServeArguments(model, tuple(given[ENGINE]), tuple(given[FACADE]), values)

    def help_text(self) -> str:
        width = max(60, min(shutil.get_terminal_size().columns, 100))
        shared = {name for name, owners in self._known.items() if len(owners) == 2}
        sections = (
            ("Both", [f for f in self._by_owner[ENGINE] if shared.intersection(f.names)]),
            ("Facade (HTTP)", [f for f in self._by_owner[FACADE] if not shared & {*f.names}]),
            ("Engine (gRPC)", [f for f in self._by_owner[ENGINE] if not shared & {*f.names}]),
        )
        lines = []
        for title, flags in sections:
            if flags:
                lines += ["", f"{title}:"]
            for flag in flags:
                lines += _help_lines(flag, width)
        return "\n".join(lines)

    def _owners(self, name: str) -> list[tuple[str, Flag]]:
        if owners := self._known.get(name):
            return owners
        if name == "--engine":
            raise UsageError(
                "serve starts an engine of its own; --engine belongs to `firsttoken facade`."
            )
        close = difflib.get_close_matches(name, self._known, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise UsageError(f"There is no flag {name}.{hint} `firsttoken serve --help` lists them.")


def _under_serve(flags: Iterable[Flag]) -> list[Flag]:
    return [
        replace(flag, names=_own_names(flag.names))
        for flag in flags
        if flag.names and flag.names[0].startswith("-") and not _NOT_UNDER_SERVE & {*flag.names}
    ]


def _own_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """`--ssl-certfile` is the HTTP edge's here: of the engine it is `--grpc-ssl-certfile`."""
    return tuple(name for name in names if name.startswith(_GRPC)) or names


def _help_lines(flag: Flag, width: int) -> list[str]:
    names = ", ".join(flag.names)
    if flag.takes_value:
        names += f" {flag.dest.upper()}"
    text = flag.help
    if flag.takes_value and flag.default and "default" not in text:
        text = f"{text} (default: {flag.default})".strip()
    return [
        f"  {names}",
        *textwrap.wrap(text, width - 8, initial_indent=" " * 8, subsequent_indent=" " * 8),
    ]
