"""The arguments of a call in Python's syntax, as one JSON object.

    city="Paris", n=3)    ->    {"city": "Paris", "n": 3}
    **{"city": "Paris"})  ->    {"city": "Paris"}, as it comes

A keyword argument is converted when it is complete. A value that is neither a Python literal nor
JSON (`sin(1)`) becomes a string of its text; one without a name is named by its place.
"""

from __future__ import annotations

import ast
import json
import re

from clients.text.tool_parsers.arguments import ArgumentsRead, JsonArguments

_UNPACKING = "**"
_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)\s*(.*)", re.DOTALL)
_MARKS = re.compile(r"""["'()\[\]{},]""")
_STRING_MARKS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class PythonArguments:
    """Reads what stands between the brackets of one call; the closing one is left."""

    def __init__(self) -> None:
        self._unpacked: JsonArguments | None = None
        self._scanner = _ArgumentScanner()
        self._num_arguments = 0

    def read(self, text: str) -> ArgumentsRead:
        if self._unpacked is not None:
            return self._unpacked.read(text)
        if self._num_arguments == 0:
            start = len(text) - len(text.lstrip())
            if text.startswith(_UNPACKING, start):
                return self._unpack(text, start + len(_UNPACKING))
            if _UNPACKING.startswith(text[start:]):
                return ArgumentsRead(0, "", False)
        return self._read_keywords(text)

    def _unpack(self, text: str, start: int) -> ArgumentsRead:
        self._unpacked = JsonArguments()
        read = self._unpacked.read(text[start:])
        return ArgumentsRead(start + read.num_chars, read.json, read.is_complete)

    def _read_keywords(self, text: str) -> ArgumentsRead:
        pieces = []
        start = 0
        while (end := self._scanner.find_end(text, start)) is not None:
            if argument := text[start:end].strip():
                pieces.append(self._converted(argument))
            if text[end] == ")":
                pieces.append("}" if self._num_arguments else "{}")
                return ArgumentsRead(end, "".join(pieces), True)
            start = end + 1
        return ArgumentsRead(start, "".join(pieces), False)

    def _converted(self, argument: str) -> str:
        opening = ", " if self._num_arguments else "{"
        keyword = _KEYWORD.fullmatch(argument)
        name, value = keyword.groups() if keyword else (str(self._num_arguments), argument)
        self._num_arguments += 1
        return f"{opening}{json.dumps(name)}: {_json_of(value)}"


class _ArgumentScanner:
    """Finds the comma or bracket that ends an argument; strings and nesting hide others."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._num_scanned = 0  # characters of the present argument
        self._depth = 0
        self._quote = ""  # of the string that is open
        self._is_escaped = False

    def find_end(self, text: str, start: int) -> int | None:
        """`start`: where the present argument begins; what was scanned of it isn't read again."""
        place = start + self._num_scanned
        while place < len(text):
            if self._quote:
                place = self._read_string(text, place)
                continue
            mark = _MARKS.search(text, place)
            if mark is None:
                break
            place = mark.end()
            if self._depth == 0 and mark[0] in ",)":
                self._begin()
                return mark.start()
            self._note(mark[0])
        self._num_scanned = len(text) - start
        return None

    def _note(self, mark: str) -> None:
        if mark in "\"'":
            self._quote = mark
        elif mark in "([{":
            self._depth += 1
        elif mark in ")]}":
            self._depth = max(self._depth - 1, 0)

    def _read_string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        mark = _STRING_MARKS[self._quote].search(text, place)
        if mark is None:
            return len(text)
        if mark[0] == "\\":
            self._is_escaped = True
        else:
            self._quote = ""
        return mark.end()


def _json_of(value: str) -> str:
    try:
        json.loads(value, parse_constant=_refuse_constant)
        return value
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(value), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
