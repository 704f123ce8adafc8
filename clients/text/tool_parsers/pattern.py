"""A regular expression that can tell whether a text which is still growing may come to match it.

It is written as atoms, each of which matches one character or a run of one kind of character. The
text so far may become a match if it is what the first few atoms match:

    atoms        A        B        C
    match        A        B        C
    may begin    (?:A (?:  B (?:    C )? )? )?
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_MAX_NAME_CHARS: Final = 256

SPACES: Final = r"[ \t\r\n]{0,16}"  # bounded: mere spaces are not held back for ever
JSON_NAME: Final = rf'(?P<name>[^"\\\n]{{1,{_MAX_NAME_CHARS}}})'
PYTHON_NAME: Final = rf"(?P<name>[A-Za-z0-9_.\-]{{1,{_MAX_NAME_CHARS}}})"


def spaced(*texts: str) -> list[str]:
    """The atoms of texts that stand for themselves, with spaces between them or none; an empty
    text at either end allows spaces there."""
    atoms: list[str] = []
    for place, text in enumerate(texts):
        atoms += [SPACES] if place else []
        atoms += map(re.escape, text)
    return atoms


def json_header(arguments_key: str) -> list[str]:
    """From the bracket of `{"name": "f", "arguments": ...}` to the colon before the arguments."""
    before = spaced("", "{", '"name"', ":", '"')
    return [*before, JSON_NAME, '"', *spaced("", ",", f'"{arguments_key}"', ":")]


class GrowingPattern:
    def __init__(self, *parts: Iterable[str]) -> None:
        """`parts`: series of atoms."""
        atoms = [atom for part in parts for atom in part]
        self._whole = re.compile("".join(atoms))
        self._beginning = re.compile("(?:".join(["", *atoms]) + ")?" * len(atoms))

    def match(self, text: str, at: int = 0) -> re.Match[str] | None:
        """The match that begins at `at`."""
        return self._whole.match(text, at)

    def may_begin(self, text: str, at: int = 0) -> bool:
        """With more text, the whole of it from `at` on may become a match."""
        return self._beginning.fullmatch(text, at) is not None
