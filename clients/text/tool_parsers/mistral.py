"""`[TOOL_CALLS]` and a JSON list: Mistral's instruction models up to their v7 tokenizer.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]

The list ends the answer. The models' templates take ids of nine letters and digits only.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from clients.text.tool_parsers import documents
from clients.text.tool_parsers.call_parser import CallSyntax, ToolParser
from clients.text.tool_parsers.format import NO_IDS, JsonObject, Tool, WrittenCall
from clients.text.tool_parsers.pattern import GrowingPattern, json_header, spaced

_BEGIN: Final = "[TOOL_CALLS]"
_ID_CHARACTERS: Final = string.ascii_letters + string.digits
_ID_LENGTH: Final = 9
_SYNTAX: Final = CallSyntax(
    first_character="[",
    header=GrowingPattern(spaced(_BEGIN, "["), json_header("arguments")),
    next_header=GrowingPattern(spaced("", "}", ","), json_header("arguments")),
    closing=GrowingPattern(spaced("", "}", "]")),
)


class Mistral:
    name = "mistral"
    markers: tuple[str, ...] = (_BEGIN,)
    example = f'{_BEGIN} [{{"name": "NAME", "arguments": {{...}}}}]'

    def new_call_id(self) -> str:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))

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
        tags = documents.call_tags(tools, '{"name": "', '", "arguments": ', "}")
        space = documents.literal(" ", NO_IDS)
        calls = [
            {"type": "optional", "content": space},  # some of the models write it
            documents.literal("[", NO_IDS),
            documents.in_a_row(tags, ", ", once=not parallel),
        ]
        begin = documents.literal(_BEGIN, special_ids)
        listed = documents.in_sequence([begin, *calls, documents.literal("]", NO_IDS)])
        if is_forced:
            return documents.nothing_else(listed)
        if _BEGIN in special_ids:
            return documents.after_any_text(listed, once=True)
        whole = documents.tag(_BEGIN, documents.in_sequence(calls), "]")
        return documents.in_free_text([_BEGIN], [whole], once=True)

    def write(self, calls: Sequence[WrittenCall]) -> str:
        objects = (f'{{"name": {json.dumps(c.name)}, "arguments": {c.arguments}}}' for c in calls)
        return f"{_BEGIN} [{', '.join(objects)}]"
