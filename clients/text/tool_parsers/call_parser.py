"""The one parser of all formats: finds calls in a text and tells of them while they are written.

    Let me look. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>
    |content    |header                                 |arguments|closing     |

A format says what its headers and closings look like (`CallSyntax`); the rest is the same for all:

- What was told is never taken back. Text is held back only while it may still become a header.
- What does not become a call is content, a header that was cut off included. Only the names of the
  tools that were given make calls.
- Spaces between content and a call, and what separates calls, belong to neither and are dropped.

Where the pieces of the text are cut has no influence on what is told, joined.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final

from clients.text.tool_parsers.arguments import ArgumentsReader, JsonArguments
from clients.text.tool_parsers.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    Content,
    ToolEvent,
)
from clients.text.tool_parsers.pattern import GrowingPattern

_SPACES: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    first_character: str  # of every header
    header: GrowingPattern  # from there to where the arguments begin; has the group `name`
    closing: GrowingPattern  # behind the arguments of the last call
    next_header: GrowingPattern | None = None  # instead of a closing, where calls stand in a list
    separators: str = _SPACES  # between calls that do not stand in a list
    read_arguments: Callable[[], ArgumentsReader] = JsonArguments


class ToolParser:
    """Reads the text of one sample."""

    def __init__(self, syntax: CallSyntax, names: Collection[str]) -> None:
        """`names`: of the tools; others make no calls."""
        self._syntax = syntax
        self._names = frozenset(names)
        self._text = ""  # what is not told yet
        self._events: list[ToolEvent] = []
        self._read: Callable[[], bool] = self._read_content
        self._is_behind_call = False  # and no content has come since
        self._arguments: ArgumentsReader = syntax.read_arguments()  # of the present call

    def push(self, text: str) -> list[ToolEvent]:
        """What is known now; pieces may have any length."""
        self._text += text
        while self._read():
            pass
        return self._take_events()

    def finish(self) -> list[ToolEvent]:
        """The text ends here."""
        if self._read == self._read_content:
            self._tell_content(self._text)
        return self._take_events()

    def _take_events(self) -> list[ToolEvent]:
        events, self._events = self._events, []
        return events

    # Each reader takes what it can from the text; True: another one goes on.

    def _read_content(self) -> bool:
        self._drop_separators()
        place = self._text.find(self._syntax.first_character)
        while place >= 0:
            header = self._syntax.header.match(self._text, place)
            if header is not None and header["name"] in self._names:
                self._tell_content(self._text[:place].rstrip(_SPACES))
                self._begin_call(header)
                return True
            if header is None and self._syntax.header.may_begin(self._text, place):
                break
            place = self._text.find(self._syntax.first_character, place + 1)
        # Spaces wait, too: a header may follow.
        certain = self._text[: place if place >= 0 else None].rstrip(_SPACES)
        self._tell_content(certain)
        self._text = self._text[len(certain) :]
        return False

    def _read_arguments(self) -> bool:
        read = self._arguments.read(self._text)
        self._text = self._text[read.num_chars :]
        if read.json:
            self._events.append(ArgumentsDelta(read.json))
        if read.is_complete:
            self._events.append(CallEnd())
            self._read = self._read_closing
        return read.is_complete

    def _read_closing(self) -> bool:
        following = self._syntax.next_header
        if following is not None:
            header = following.match(self._text)
            if header is not None and header["name"] in self._names:
                self._begin_call(header)
                return True
        closing = self._syntax.closing.match(self._text)
        if closing is None and self._may_close():
            return False
        self._text = self._text[closing.end() if closing else 0 :]
        self._is_behind_call = True
        self._read = self._read_content
        return True

    def _may_close(self) -> bool:
        following = self._syntax.next_header
        return self._syntax.closing.may_begin(self._text) or (
            following is not None and following.may_begin(self._text)
        )

    def _begin_call(self, header: re.Match[str]) -> None:
        self._events.append(CallStart(header["name"]))
        self._text = self._text[header.end() :]
        self._arguments = self._syntax.read_arguments()
        self._read = self._read_arguments

    def _drop_separators(self) -> None:
        if self._is_behind_call:
            self._text = self._text.lstrip(self._syntax.separators)

    def _tell_content(self, text: str) -> None:
        if text:
            self._events.append(Content(text))
            self._is_behind_call = False
