"""What the operations of /openapi.json refer to: schemas, headers, parameters, errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec
from msgspec import Struct

from http_facade.descriptions import description_of
from http_facade.errors import ErrorEnvelope
from http_facade.openapi_routes import OPERATIONS

Json = dict[str, Any]  # what a JSON object is, whatever it says

_REF = "#/components/schemas/{name}"
_ERRORS: Mapping[int, str] = {
    400: "A field is wrong, and `param` names it; or the prompt is too long for the model.",
    401: "No valid key was sent.",
    403: "The key may not do this, or the server doesn't go by the name that was asked for.",
    404: "No such model, or no such thing.",
    413: "The body is larger than is taken.",
    415: "The body is not JSON, or is encoded in a way that is not read.",
    429: "The queue is full, or a limit of the key is reached: retry after the time that is said.",
    500: "A fault of the server.",
    503: "The engine is not there, or the server is stopping or has no room: retry after the time"
    " that is said.",
    504: "The deadline of the request passed.",
}
_RETRY_STATUSES = (429, 503)

_QUOTAS = {
    f"x-ratelimit-{which}-{unit}": f"{words} {unit} a minute of a key that has such a limit"
    for unit in ("requests", "tokens")
    for which, words in (("limit", "the"), ("remaining", "what is left of the"))
}
_RESETS = {
    f"x-ratelimit-reset-{unit}": f"until all {unit} are there again, like 6m0s or 17ms"
    for unit in ("requests", "tokens")
}
QUOTA_HEADERS = (*_QUOTAS, *_RESETS)
HEADERS: Json = {
    **{
        name: {"description": words, "schema": {"type": "integer"}}
        for name, words in _QUOTAS.items()
    },
    **{
        name: {"description": words, "schema": {"type": "string"}}
        for name, words in _RESETS.items()
    },
    "x-request-id": {
        "description": "the caller's own, or the answer's id",
        "schema": {"type": "string"},
    },
    "x-ignored-params": {
        "description": "fields of the request that were ignored, separated by commas",
        "schema": {"type": "string"},
    },
    "Retry-After": {"description": "seconds", "schema": {"type": "integer"}},
    "retry-after-ms": {"description": "milliseconds", "schema": {"type": "integer"}},
    "x-should-retry": {
        "description": "what OpenAI's client libraries go by",
        "schema": {"enum": ["true", "false"]},
    },
}
PARAMETERS: Json = {
    "x-request-id": {
        "name": "x-request-id",
        "in": "header",
        "description": "comes back with the answer, and stands in logs and traces",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,128}$"},
    },
    "x-request-timeout": {
        "name": "x-request-timeout",
        "in": "header",
        "description": "seconds after which the request has failed (504)",
        "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 86400},
    },
}


def error_name(status: int) -> str:
    return f"Error{status}"


def error_responses() -> Json:
    return {error_name(status): _error(status) for status in _ERRORS}


def _error(status: int) -> Json:
    answer: Json = {
        "description": _ERRORS[status],
        "content": {"application/json": {"schema": ref(ErrorEnvelope)}},
    }
    names = ["x-request-id"]
    if status in _RETRY_STATUSES:
        names += ["Retry-After", "retry-after-ms", "x-should-retry"]
    return {**answer, "headers": header_refs(names)}


def header_refs(names: Sequence[str]) -> Json:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def ref(struct: type[Struct]) -> Json:
    return {"$ref": _REF.format(name=struct.__name__)}


def schemas() -> Json:
    structs: dict[type[Struct], None] = {ErrorEnvelope: None}
    for operation in OPERATIONS:
        structs |= dict.fromkeys(operation.structs())
    _, components = msgspec.json.schema_components(
        structs, schema_hook=_anything, ref_template=_REF
    )
    described: Json = _with_plain_patterns(components)
    for struct in _all_structs(structs):
        for field, schema in described[struct.__name__]["properties"].items():
            if (words := description_of(struct, field)) is not None:
                schema["description"] = words
    return described


def _anything(kind: type) -> Json:
    if kind is object:
        return {"description": "any JSON"}
    raise NotImplementedError  # msgspec's protocol: that there is no schema for it


def _with_plain_patterns(node: Any) -> Any:
    r"""Python's `\Z` is `$` in a JSON Schema."""
    if isinstance(node, dict):
        plain = {name: _with_plain_patterns(value) for name, value in node.items()}
        if isinstance(pattern := plain.get("pattern"), str) and pattern.endswith(r"\Z"):
            plain["pattern"] = pattern.removesuffix(r"\Z") + "$"
        return plain
    return [_with_plain_patterns(one) for one in node] if isinstance(node, list) else node


def _all_structs(roots: Mapping[type[Struct], None]) -> set[type[Struct]]:
    """The Structs that these ones hold, and they themselves."""
    found: set[type[Struct]] = set()
    pending: list[object] = list(roots)
    while pending:
        kind = pending.pop()
        if isinstance(kind, type) and issubclass(kind, Struct) and kind not in found:
            found.add(kind)
            pending.extend(field.type for field in msgspec.structs.fields(kind))
        pending.extend(get_args(kind))
    return found
