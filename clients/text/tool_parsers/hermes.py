"""`<tool_call>` and a JSON object: Hermes, Qwen2.5, Qwen3 and many others.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import NO_IDS, JsonObject, Tool, WrittenCall
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
    markers: tuple[str, ...] = (_BEGIN, _END)
    example = f'{_BEGIN}\n{{"name": "NAME", "arguments": {{...}}}}\n{_END}'

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
        if _BEGIN in special_ids:
            call = _call_between_tokens(tools, special_ids)
            if not is_forced:
                return documents.after_any_text(call, once=not parallel)
            return documents.nothing_else(call if not parallel else _one_a_line(call))
        tags = documents.call_tags(
            tools, f'{_BEGIN}\n{{"name": "', '", "arguments": ', f"}}\n{_END}"
        )
        if is_forced:
            return documents.nothing_else(documents.in_a_row(tags, "\n", once=not parallel))
        return documents.in_free_text([_BEGIN], tags, once=not parallel)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        objects = (f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in calls)
        return "\n".join(f"{_BEGIN}\n{text}\n{_END}" for text in objects)


def _call_between_tokens(tools: Sequence[Tool], special_ids: Mapping[str, int]) -> JsonObject:
    """Of one of the tools."""
    calls = [
        documents.in_sequence(
            [
                documents.literal(f'\n{{"name": "{tool.name}", "arguments": ', NO_IDS),
                documents.arguments(tool),
            ]
        )
        for tool in tools
    ]
    return documents.in_sequence(
        [
            documents.literal(_BEGIN, special_ids),
            documents.one_of(calls),
            documents.literal("}\n", NO_IDS),
            documents.literal(_END, special_ids),
        ]
    )


def _one_a_line(call: JsonObject) -> JsonObject:
    """One or more."""
    line_end: JsonObject = {"type": "optional", "content": documents.literal("\n", NO_IDS)}
    return {"type": "plus", "content": documents.in_sequence([call, line_end])}
