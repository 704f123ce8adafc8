"""Structural tags, xgrammar's documents for text with constrained parts, as plain JSON.

Two things in them are the engine's own: a `json_schema` node may say `relax_unenforced`, and how
much whitespace JSON may have is not said here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from clients.text.tool_parsers.format import JsonObject, Tool


def arguments(tool: Tool) -> JsonObject:
    node = {"type": "json_schema", "json_schema": tool.parameters}
    return {**node, "relax_unenforced": True} if tool.relax_unenforced else node


def tag(begin: str, content: JsonObject, end: str) -> JsonObject:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def call_tags(
    tools: Sequence[Tool], before_name: str, before_arguments: str, end: str
) -> list[JsonObject]:
    """One tag for each tool, in order."""
    return [tag(before_name + one.name + before_arguments, arguments(one), end) for one in tools]


def in_free_text(triggers: Sequence[str], tags: Sequence[JsonObject], *, once: bool) -> JsonObject:
    """Any text; a trigger in it begins one of the tags. `once`: nothing follows the first."""
    return {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": list(triggers),
            "tags": list(tags),
            "stop_after_first": once,
        },
    }


def literal(text: str, special_ids: Mapping[str, int]) -> JsonObject:
    """The text; where the vocabulary has it as a special token, that token and nothing else."""
    token_id = special_ids.get(text)
    if token_id is None:
        return {"type": "const_string", "value": text}
    return {"type": "token", "token": token_id}


def after_any_text(call: object, *, once: bool) -> JsonObject:
    """Any text and calls in it. A call begins with a special token, which no text holds: so it
    needs no trigger. `once`: nothing follows the first."""
    any_text: JsonObject = {"type": "any_text"}
    if once:
        return nothing_else(in_sequence([any_text, {"type": "optional", "content": call}]))
    more: JsonObject = {"type": "star", "content": in_sequence([call, any_text])}
    return nothing_else(in_sequence([any_text, more]))


def in_a_row(tags: Sequence[JsonObject], separator: str, *, once: bool) -> JsonObject:
    """A format: at least one of the tags and nothing else."""
    if once and len(tags) == 1:
        return tags[0]
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": once,
    }


def nothing_else(content: object) -> JsonObject:
    """A whole document of one format."""
    return {"type": "structural_tag", "format": content}


def in_sequence(formats: Sequence[object]) -> JsonObject:
    return {"type": "sequence", "elements": list(formats)}


def one_of(formats: Sequence[object]) -> JsonObject:
    return {"type": "or", "elements": list(formats)}


def random_call_id() -> str:
    return "call_" + secrets.token_hex(12)
