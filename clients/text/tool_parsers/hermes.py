"""`<tool_call>` and a JSON object: Hermes, Qwen2.5, Qwen3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import JsonObject, Tool, WrittenCall
from clients.text.tool_parsers.pattern import GrowingPattern, json_header, spaced

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_SYNTAX: Final = CallSyntax(
    first_character="<",
    header=GrowingPattern(spaced(_BEGIN), json_header("arguments")),
    closing=GrowingPattern(spaced("", "}", _END)),
)


class Hermes:
    name = "hermes"
    marker = _BEGIN
    example = f'{_BEGIN}\n{{"name": "NAME", "arguments": {{...}}}}\n{_END}'

    def new_call_id(self) -> str:
        return documents.random_call_id()

    def parser(self, names: Collection[str]) -> ToolParser:
        return ToolParser(_SYNTAX, names)

    def structural_tag(
        self, tools: Sequence[Tool], *, is_forced: bool, parallel: bool
    ) -> JsonObject:
        tags = documents.call_tags(
            tools, f'{_BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{_END}"
        )
        if is_forced:
            return documents.nothing_else(documents.in_a_row(tags, "\n", once=not parallel))
        return documents.in_free_text([_BEGIN], tags, once=not parallel)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        objects = (f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in calls)
        return "\n".join(f"{_BEGIN}\n{text}\n{_END}" for text in objects)
