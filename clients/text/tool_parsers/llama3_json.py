"""A bare JSON object: Llama 3.1 and 3.2.

    {"name": "get_weather", "parameters": {"city": "Paris"}}

Several calls are separated by semicolons. There is no marker: a text that is not constrained is
read as a call only where it names one of the tools; one that is constrained can't say `{"name": "`
without going on to a call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import NO_IDS, JsonObject, Tool, WrittenCall
from clients.text.tool_parsers.pattern import GrowingPattern, json_header, spaced

_BEGIN: Final = '{"name": "'
_SYNTAX: Final = CallSyntax(
    first_character="{",
    header=GrowingPattern(json_header("parameters")),
    closing=GrowingPattern(spaced("", "}")),
    separators=" \t\r\n;",
)


class Llama3Json:
    name = "llama3_json"
    markers: tuple[str, ...] = ()
    example = '{"name": "NAME", "parameters": {...}}'

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
        tags = documents.call_tags(tools, _BEGIN, '", "parameters": ', "}")
        if is_forced:
            return documents.nothing_else(documents.in_a_row(tags, "; ", once=not parallel))
        return documents.in_free_text([_BEGIN], tags, once=not parallel)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "; ".join(
            f'{{"name": {json.dumps(c.name)}, "parameters": {c.arguments}}}' for c in calls
        )
