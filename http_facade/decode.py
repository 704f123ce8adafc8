"""From a body to a checked request, naming every field that is wrong or not honoured.

Messages speak of JSON (string, number, array), never of Python.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Generic, TypeVar, get_args
from urllib.parse import quote

import msgspec

from http_facade.body import decode_json
from http_facade.decisions import IGNORED, REFUSED, REFUSED_INSIDE
from http_facade.errors import ApiError, invalid
from http_facade.off_loop import INLINE_BYTES, run_by_size
from http_facade.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

RequestT = TypeVar("RequestT", bound=msgspec.Struct)

_MAX_HEADER_CHARS = 1_000  # of x-ignored-params
_MAX_NAMED_NESTED = 32  # fields inside objects


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[RequestT]):
    path: str
    request_type: type[RequestT]
    prompt_param: str  # what it calls its prompt


CHAT = Endpoint("/v1/chat/completions", ChatRequest, "messages")
COMPLETIONS = Endpoint("/v1/completions", CompletionRequest, "prompt")
RENDER = Endpoint("/v1/chat/completions/render", ChatRequest, "messages")
TOKENIZE = Endpoint("/tokenize", TokenizeRequest, "prompt")
DETOKENIZE = Endpoint("/detokenize", DetokenizeRequest, "tokens")
# what generates: a field of the one means something that the other would have to drop
_ENDPOINTS: tuple[Endpoint[ChatRequest] | Endpoint[CompletionRequest], ...] = (
    CHAT,
    COMPLETIONS,
    RENDER,
)


@dataclass(frozen=True, slots=True)
class Decoded(Generic[RequestT]):
    request: RequestT
    ignored: tuple[str, ...]  # fields to name in x-ignored-params
    prompt: object  # messages or prompt as they came


async def parse_body(
    body: bytearray, endpoint: Endpoint[RequestT], *, strict: bool
) -> Decoded[RequestT]:
    """Raises ApiError for the first thing that is wrong."""
    return await run_by_size(
        lambda: decode_request(decode_json(body), endpoint, strict=strict),
        len(body),
        max_inline=INLINE_BYTES,
    )


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
    nested = list(islice(_unknown_nested(fields, endpoint.request_type), _MAX_NAMED_NESTED))
    if strict and nested:
        raise invalid(nested[0], "unknown field")
    return Decoded(request, (*ignored, *nested), fields.get(endpoint.prompt_param))


# ---------------------------------------------------------------- fields that are not honoured


def _decide(fields: dict[str, object], endpoint: Endpoint[RequestT], strict: bool) -> list[str]:
    """Removes from `fields` what isn't honoured and returns the names to report."""
    honoured = _field_names(endpoint.request_type)
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
        elif endpoint in _ENDPOINTS and (home := _home_of(name)) is not None:
            if not _is_one_of(value, (_default(home, name),)):
                raise invalid(name, f"only {home.path} takes it", code="unsupported_parameter")
        elif strict:
            raise invalid(name, "unknown field", code="unknown_parameter")
        else:
            ignored.append(name)
    return ignored


def _is_one_of(value: object, candidates: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in candidates)


@cache
def _field_names(struct: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(struct.__struct_fields__)


def _home_of(name: str) -> Endpoint[ChatRequest] | Endpoint[CompletionRequest] | None:
    for endpoint in _ENDPOINTS:
        if name in _field_names(endpoint.request_type):
            return endpoint
    return None


def _default(home: Endpoint[ChatRequest] | Endpoint[CompletionRequest], name: str) -> object:
    for field in msgspec.structs.fields(home.request_type):
        if field.name == name:
            return field.default
    return msgspec.NODEFAULT


def _unknown_nested(
    value: Mapping[str, object], struct: type[msgspec.Struct], path: str = ""
) -> Iterator[str]:
    """Unknown fields inside the known objects, by their paths; `value` fits the schema.

    Raises ApiError for one that would change the answer."""
    inside, known = inner_structs(struct), _field_names(struct)
    for name, item in value.items():
        where = f"{path}.{name}" if path else name
        if item is None:
            continue
        if name not in known:
            refusal = REFUSED_INSIDE.get(struct, {}).get(name)
            if refusal is not None and not _is_one_of(item, refusal.neutral):
                raise invalid(where, refusal.hint, code="unsupported_parameter")
            yield where
        elif (inner := inside.get(name)) is not None:
            for place, one in _objects_in(item, where):
                yield from _unknown_nested(one, inner, place)


def _objects_in(value: object, path: str) -> Iterator[tuple[str, dict[str, object]]]:
    """The object that a field holds, or those of its list, each with its path."""
    if isinstance(value, dict):
        yield path, value
    elif isinstance(value, list):
        for i, one in enumerate(value):
            if isinstance(one, dict):
                yield f"{path}[{i}]", one


@cache
def inner_structs(struct: type[msgspec.Struct]) -> Mapping[str, type[msgspec.Struct]]:
    """What the objects in a Struct's fields are; a field has at most one kind of them."""
    found: dict[str, type[msgspec.Struct]] = {}
    for field in msgspec.structs.fields(struct):
        pending: list[object] = [field.type]
        while pending:
            one = pending.pop()
            if isinstance(one, type) and issubclass(one, msgspec.Struct):
                found[field.name] = one
            pending.extend(get_args(one))
    return found


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
