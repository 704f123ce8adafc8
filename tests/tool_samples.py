"""Texts with tool calls, as models write them in each format, and what is in them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from clients.text.tool_parsers import ArgumentsDelta, CallEnd, CallStart, Content, ToolEvent

NAMES = ("get_weather", "get_time", "f", "ping")

# Values that end calls, open brackets and close strings where nothing ends.
HARD_ARGUMENTS: tuple[dict[str, object], ...] = (
    {},
    {"n": 42},
    {"f": [True, None]},
    {"o": {"a": {"b": 1}}},
    {"s": 'a"}]'},
    {"s": "\\"},
    {"s": '\\"</tool_call>'},
    {"a": "[]{}()", "b": [[], {}, [[1, [2]], -1.5e3]], "c": False},
    {"é": "🌶 漢字", "empty": "", "nothing": None},
    {"code": "def f(x):\n    return {'a': [x]}\n", "sql": "SELECT ';' FROM t"},
)


@dataclass
class Read:
    """All that a parser told of one text, added up."""

    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)  # name, arguments
    num_complete: int = 0
    order: list[str] = field(default_factory=list)  # content and names, as they came

    @property
    def arguments(self) -> list[object]:
        return [json.loads(arguments) for _, arguments in self.calls]


def read_events(events: Iterable[ToolEvent]) -> Read:
    read = Read()
    in_call = False
    for event in events:
        match event:
            case Content(text):
                assert not in_call and text
                read.content += text
                if not read.order or read.order[-1] != "content":
                    read.order.append("content")
            case CallStart(name):
                assert not in_call
                in_call = True
                read.calls.append((name, ""))
                read.order.append(name)
            case ArgumentsDelta(text):
                assert in_call and text
                name, arguments = read.calls[-1]
                read.calls[-1] = (name, arguments + text)
            case CallEnd():
                assert in_call
                in_call = False
                read.num_complete += 1
    return read
