"""From plain data to a checked request, naming every field that is wrong or not honoured.

Messages speak of JSON (string, number, array), never of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar
from urllib.parse import quote

import msgspec

from http_facade.decisions import IGNORED, REFUSED
from http_facade.errors import ApiError, invalid
from http_facade.schema import (
    ChatRequest,
    CompletionRequest,
    ContentPart,
    FunctionDefinition,
    GenerationFields,
    JsonSchemaFormat,
    Message,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    ToolDefinition,
)

RequestT = TypeVar("RequestT", bound=GenerationFields)

_MAX_HEADER_CHARS = 1_000  # of x-ignored-params
_MAX_NAMED_NESTED = 32  # fields inside messages


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[RequestT]):
    path: str
    request_type: type[RequestT]
    prompt_param: str  # what it calls its prompt


CHAT = Endpoint("/v1/chat/completions", ChatRequest, "messages")
COMPLETIONS = Endpoint("/v1/completions", CompletionRequest, "prompt")
_ENDPOINTS: tuple[Endpoint[ChatRequest] | Endpoint[CompletionRequest], ...] = (CHAT, COMPLETIONS)


@dataclass(frozen=True, slots=True)
class Decoded(Generic[RequestT]):
    request: RequestT
    ignored: tuple[str, ...]  # fields to name in x-ignored-params


def decode_request(
    body: object, endpoint: Endpoint[RequestT], *, strict: bool
) -> Decoded[RequestT]:
    """Raises ApiError for the first field that is wrong."""
    if not isinstance(body, dict):
        raise invalid(None, "the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    ignored = _decide(fields, endpoint, strict)
    try:
        request = msgspec.convert(fields, endpoint.request_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise _from_validation_error(error) from None
    except RecursionError:
        raise invalid(None, "the body is nested too deeply", code="invalid_json") from None
    nested = _unknown_nested(fields)
    if strict and nested:
        raise invalid(nested[0], "unknown field")
    return Decoded(request, (*ignored, *nested))


# ---------------------------------------------------------------- fields that are not honoured


def _decide(fields: dict[str, object], endpoint: Endpoint[RequestT], strict: bool) -> list[str]:
    """Removes from `fields` what isn't honoured and returns the names to report."""
    honoured = endpoint.request_type.__struct_fields__
    ignored = []
    for name in [name for name in fields if name not in honoured]:
        value = fields.pop(name)
        if name in IGNORED:
            ignored.append(name)
        elif name in REFUSED:
            refusal = REFUSED[name]
            if not _is_one_of(value, refusal.neutral):
                raise invalid(name, refusal.hint, code="unsupported_parameter")
            if refusal.neutral_is_ignored:
                ignored.append(name)
        elif (home := _home_of(name)) is not None:
            if not _is_one_of(value, (_default(home, name),)):
                raise invalid(name, f"only {home.path} takes it", code="unsupported_parameter")
        elif strict:
            raise invalid(name, "unknown field", code="unknown_parameter")
        else:
            ignored.append(name)
    return ignored


def _is_one_of(value: object, candidates: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in candidates)


def _home_of(name: str) -> Endpoint[ChatRequest] | Endpoint[CompletionRequest] | None:
    for endpoint in _ENDPOINTS:
        if name in endpoint.request_type.__struct_fields__:
            return endpoint
    return None


def _default(home: Endpoint[ChatRequest] | Endpoint[CompletionRequest], name: str) -> object:
    for field in msgspec.structs.fields(home.request_type):
        if field.name == name:
            return field.default
    return msgspec.NODEFAULT


def _unknown_nested(fields: Mapping[str, object]) -> list[str]:
    """Unknown fields inside the known objects; called on data that fits the schema."""
    unknown = _unknown_in(fields.get("stream_options"), StreamOptions, "stream_options")
    structured_outputs = fields.get("structured_outputs")
    unknown += _unknown_in(structured_outputs, StructuredOutputs, "structured_outputs")
    response_format = fields.get("response_format")
    unknown += _unknown_in(response_format, ResponseFormat, "response_format")
    unknown += _unknown_below(response_format, "json_schema", JsonSchemaFormat, "response_format")
    for path, tool in _members(fields, "tools"):
        unknown += _unknown_in(tool, ToolDefinition, path)
        unknown += _unknown_below(tool, "function", FunctionDefinition, path)
    for path, message in _members(fields, "messages"):
        unknown += _unknown_in(message, Message, path)
        content = message if isinstance(message, dict) else {}
        for part_path, part in _members(content, "content"):
            unknown += _unknown_in(part, ContentPart, f"{path}.{part_path}")
        if len(unknown) >= _MAX_NAMED_NESTED:
            break
    return unknown


def _members(fields: Mapping[str, object], name: str) -> Iterator[tuple[str, object]]:
    """The members of a field that may be a list, each with its path."""
    members = fields.get(name)
    for i, member in enumerate(members if isinstance(members, list) else ()):
        yield f"{name}[{i}]", member


def _unknown_below(value: object, name: str, struct: type[msgspec.Struct], path: str) -> list[str]:
    return _unknown_in(value.get(name), struct, f"{path}.{name}") if isinstance(value, dict) else []


def _unknown_in(value: object, struct: type[msgspec.Struct], path: str) -> list[str]:
    if not isinstance(value, dict):
        return []
    known = struct.__struct_fields__
    return [f"{path}.{key}" for key, item in value.items() if key not in known and item is not None]


def ignored_header(names: tuple[str, ...]) -> str:
    """The value of x-ignored-params; names come from the caller and are made safe for a header."""
    shown: list[str] = []
    length = 0
    for name in names:
        safe = quote(name[:100], safe="._-[]", errors="replace")
        length += len(safe) + 2
        if length > _MAX_HEADER_CHARS:
            shown.append(f"and {len(names) - len(shown)} more")
            break
        shown.append(safe)
    return ", ".join(shown)


# ---------------------------------------------------------------- msgspec's complaints

_WORDS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "null": "null",
}
_AT = re.compile(r" - at (?:`key` in )?`\$(?P<path>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>\w+)`")


def _from_validation_error(error: msgspec.ValidationError) -> ApiError:
    text = str(error)
    path = ""
    if match := _AT.search(text):
        path = match["path"].lstrip(".")
        text = text[: match.start()]
    if missing := _MISSING.match(text):
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return invalid(_param(path), "this field is required", code="missing_required_parameter")
    return invalid(_param(path), _in_json_words(text))


def _param(path: str) -> str | None:
    """`messages[2].content[0].text` is reported as the content it stands in."""
    path = path.replace("[...]", "")
    return re.sub(r"^(messages\[\d+\]\.content).*$", r"\1", path) or None


def _in_json_words(text: str) -> str:
    def translate(match: re.Match[str]) -> str:
        words = match[1].split(" | ")
        return " or ".join(_WORDS.get(word, word) for word in words)

    text = re.sub(r"`([^`]*)`", translate, text)
    return text[:1].lower() + text[1:]
