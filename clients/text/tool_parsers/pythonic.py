"""A list of calls in Python's syntax: Llama 4 and others.

    [get_weather(city="Paris"), get_time(zone="CET")]

What a JSON Schema says can be enforced on JSON only. So a constrained call has its arguments as
one JSON object, which Python's syntax has a place for, and each is a list of its own:

    [get_weather(**{"city": "Paris"})]

The parser reads both, and writes what is not JSON as JSON, argument by argument.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import NO_IDS, JsonObject, Tool, WrittenCall
from clients.text.tool_parsers.pattern import PYTHON_NAME, GrowingPattern, spaced
from clients.text.tool_parsers.python_arguments import PythonArguments

_CALL: Final = (PYTHON_NAME, *spaced("("))
_SYNTAX: Final = CallSyntax(
    first_character="[",
    header=GrowingPattern(spaced("[", ""), _CALL),
    next_header=GrowingPattern(spaced("", ")", ",", ""), _CALL),
    closing=GrowingPattern(spaced("", ")", "]")),
    read_arguments=PythonArguments,
)


class Pythonic:
    name = "pythonic"
    markers: tuple[str, ...] = ()
    example = '[NAME(parameter="value", ...)]'

    def new_call_id(self) -> str:
        return documents.random_call_id()

    def parser(self, names: Collection[str]) -> ToolParser:
        return ToolParser(_SYNTAX, names)

    def structural_tag(
        self,
        tools: Sequence[Tool],
        *,
        is_forced: bool,
        parallel: bool,
        special_ids: Mapping[str, int] = NO_IDS,
    ) -> JsonObject:
        tags = documents.call_tags(tools, "[", "(**", ")]")
        if is_forced:
            return documents.nothing_else(documents.in_a_row(tags, "\n", once=not parallel))
        triggers = [f"[{tool.name}(" for tool in tools]
        return documents.in_free_text(triggers, tags, once=not parallel)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return f"[{', '.join(f'{call.name}(**{call.arguments})' for call in calls)}]"
