"""`[TOOL_CALLS]`, a name, `[ARGS]` and JSON: Mistral's models from their v11 tokenizer on.

[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import NO_IDS, JsonObject, Tool, WrittenCall
from clients.text.tool_parsers.mistral import Mistral
from clients.text.tool_parsers.pattern import PYTHON_NAME, GrowingPattern, spaced

_BEGIN: Final = "[TOOL_CALLS]"
_ARGUMENTS: Final = "[ARGS]"
_SYNTAX: Final = CallSyntax(
    first_character="[",
    header=GrowingPattern(spaced(_BEGIN, ""), (PYTHON_NAME,), spaced("", _ARGUMENTS, "")),
    closing=GrowingPattern(),
)


class MistralV11(Mistral):
    name = "mistral_v11"
    markers = (_BEGIN, _ARGUMENTS)
    example = f"{_BEGIN}NAME{_ARGUMENTS}{{...}}"

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
        if is_forced or _BEGIN in special_ids:
            call = _call(tools, special_ids)
            if not is_forced:
                return documents.after_any_text(call, once=not parallel)
            several: JsonObject = {"type": "plus", "content": call}
            return documents.nothing_else(several if parallel else call)
        tags = documents.call_tags(tools, _BEGIN, _ARGUMENTS, "")
        return documents.in_free_text([_BEGIN], tags, once=not parallel)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        return "".join(f"{_BEGIN}{call.name}{_ARGUMENTS}{call.arguments}" for call in calls)


def _call(tools: Sequence[Tool], special_ids: Mapping[str, int]) -> JsonObject:
    """Of one of the tools."""
    arguments = documents.literal(_ARGUMENTS, special_ids)
    calls = [
        documents.in_sequence(
            [documents.literal(tool.name, NO_IDS), arguments, documents.arguments(tool)]
        )
        for tool in tools
    ]
    return documents.in_sequence([documents.literal(_BEGIN, special_ids), documents.one_of(calls)])
