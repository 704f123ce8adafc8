"""Where a JSON value ends, in a text that comes piece by piece."""

from __future__ import annotations

import re

_MARKS = re.compile(r'["{}\[\]]')
_STRING_MARKS = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[\s,}\]]")  # what ends a number, true, false or null


class JsonValueScanner:
    """Reads one value, which begins with the first character given. It looks at brackets and
    quotes only: whether the value is valid is not its business."""

    def __init__(self) -> None:
        self._depth = 0  # of open brackets
        self._in_string = False
        self._is_escaped = False  # the next character of a string is
        self._is_scalar = False
        self.is_complete = False

    def feed(self, text: str) -> int:
        """How many of these characters belong to the value."""
        place = 0
        while place < len(text) and not self.is_complete:
            if self._in_string:
                place = self._read_string(text, place)
            elif self._is_scalar:
                place = self._read_scalar(text, place)
            else:
                place = self._read_structure(text, place)
        return place

    def _read_string(self, text: str, place: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return place + 1
        mark = _STRING_MARKS.search(text, place)
        if mark is None:
            return len(text)
        if mark[0] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_complete = self._depth == 0
        return mark.end()

    def _read_scalar(self, text: str, place: int) -> int:
        end = _AFTER_SCALAR.search(text, place)
        if end is None:
            return len(text)
        self.is_complete = True
        return end.start()

    def _read_structure(self, text: str, place: int) -> int:
        mark = _MARKS.search(text, place)
        if self._depth == 0 and (mark is None or mark.start() > place):
            self._is_scalar = True
            return place
        if mark is None:
            return len(text)
        if mark[0] == '"':
            self._in_string = True
        elif mark[0] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.is_complete = self._depth <= 0
        return mark.end()
