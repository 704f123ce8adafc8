"""The arguments of one call, read from a text that comes piece by piece, as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from clients.text.tool_parsers.json_value import JsonValueScanner


@dataclass(frozen=True, slots=True)
class ArgumentsRead:
    num_chars: int  # of the text given, that are done with
    json: str  # the piece of the arguments that they make
    is_complete: bool


class ArgumentsReader(Protocol):
    def read(self, text: str) -> ArgumentsRead:
        """`text`: all that is there and was not done with before."""
        ...


class JsonArguments:
    """Arguments that are JSON already: passed on as they come, without the spaces before them."""

    def __init__(self) -> None:
        self._scanner = JsonValueScanner()
        self._has_begun = False

    def read(self, text: str) -> ArgumentsRead:
        value = text if self._has_begun else text.lstrip()
        self._has_begun = bool(value) or self._has_begun
        num_chars = self._scanner.feed(value)
        return ArgumentsRead(
            len(text) - len(value) + num_chars, value[:num_chars], self._scanner.is_complete
        )
