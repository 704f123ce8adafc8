"""From a grammar's source to xgrammar's compiled form: one call for each kind of source.

JSON is written on one line with ", " and ": " and no other whitespace, also within a structural
tag: its schemas are put in as the grammars they stand for (see `schema_check`). A choice is a
structural tag too: so its texts need no quoting.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Final

from engine_service.errors import InvalidRequest
from engine_service.messages import StructuredOutput
from engine_service.schema_check import check_schema
from engine_service.schema_error import Json

if TYPE_CHECKING:
    import xgrammar

_ANY_OBJECT: Final = '{"type": "object"}'
_LOCATION: Final = re.compile(r"^\[[\d:]+\]\s*\S+:\d+:\s*(Check failed: \(.*?\) is false:\s*)?")
_MAX_REASON_CHARS: Final = 200


class BadGrammar(Exception):
    """The source is none of its kind; the text is for the caller."""


def compile_source(compiler: xgrammar.GrammarCompiler, spec: StructuredOutput) -> str:
    """In xgrammar's serialized form. Takes as much time and memory as the source makes it.
    Raises BadGrammar, or MemoryError."""
    try:
        return _compile(compiler, spec).serialize_json()
    except (RuntimeError, ValueError) as error:  # all that xgrammar raises for a bad source
        if "bad_alloc" in str(error):
            raise MemoryError from error
        raise BadGrammar(_reason(str(error))) from error


def _compile(
    compiler: xgrammar.GrammarCompiler, spec: StructuredOutput
) -> xgrammar.CompiledGrammar:
    match spec.kind:
        case "json_schema":
            return compiler.compile_grammar(_grammar_of(spec.source))
        case "json_object":
            return compiler.compile_grammar(_grammar_of(_ANY_OBJECT))
        case "regex":
            return compiler.compile_regex(spec.source)
        case "grammar":
            return compiler.compile_grammar(spec.source)
        case "choice":
            return compiler.compile_structural_tag(_tag_of_choice(spec.source))
        case "structural_tag":
            return compiler.compile_structural_tag(_tag_without_schemas(spec.source))


def _tag_of_choice(source: str) -> str:
    texts = [{"type": "const_string", "value": value} for value in json.loads(source)]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": texts}})


def _tag_without_schemas(source: str) -> str:
    return json.dumps(_without_schemas(json.loads(source)))


def _without_schemas(node: Json) -> Json:
    if isinstance(node, list):
        return [_without_schemas(child) for child in node]
    if not isinstance(node, dict):
        return node
    if node.get("type") == "json_schema":
        return {"type": "grammar", "grammar": _grammar_of(json.dumps(node["json_schema"]))}
    return {key: _without_schemas(child) for key, child in node.items()}


def _grammar_of(schema: str) -> str:
    """By our own reading: xgrammar's writes text that is no JSON for some keywords, and drops
    others. The schema was checked at the door, so that this takes little time."""
    try:
        return check_schema(schema).grammar
    except InvalidRequest as error:
        raise BadGrammar(error.message) from error


def _reason(message: str) -> str:
    """xgrammar's message without the place in its sources."""
    lines = _LOCATION.sub("", message.strip()).splitlines() or [""]
    reason = lines[0].strip()
    if not reason or "call is<type>() before get<type>()" in reason:
        reason = "a keyword has a value of the wrong type"
    return reason[:_MAX_REASON_CHARS]
