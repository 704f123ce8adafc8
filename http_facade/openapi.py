"""The OpenAPI 3.1 document of every route, made from the Structs that requests and answers are.

A route is described here and nowhere else; a test compares the table with the application's
routes, another one real answers with the schemas.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from msgspec import Struct

from http_facade.decisions import IGNORED, REFUSED
from http_facade.openapi_components import (
    HEADERS,
    PARAMETERS,
    QUOTA_HEADERS,
    Json,
    error_name,
    error_responses,
    header_refs,
    ref,
    schemas,
)
from http_facade.openapi_examples import answer_example, request_example
from http_facade.openapi_routes import OPERATIONS, TRACE_OPERATIONS, Operation

_ON_EVERY_ANSWER = ("x-request-id", "x-ignored-params")
_INTRODUCTION = """\
OpenAI's API in front of a firsttoken engine. Any client library that speaks to OpenAI works with
`base_url` set to this server and `/v1`.

Nothing is dropped silently: a field is honoured; or ignored and named in the answer's header
`x-ignored-params`; or refused with 400 and named in `error.param`. null is the same as absent.

Every answer carries `x-request-id`: the caller's own where it sent a valid one. A W3C `traceparent`
is continued.
"""


def openapi_document(model: str, *, shows_traces: bool = False) -> Json:
    """`model`: the name that the examples show. `shows_traces`: there are the routes of /traces."""
    operations = OPERATIONS + TRACE_OPERATIONS if shows_traces else OPERATIONS
    paths: dict[str, Json] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _operation(
            operation, model
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "firsttoken",
            "version": version("firsttoken"),
            "description": _INTRODUCTION,
        },
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"apiKey": []}, {}],
        "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in operations)],
        "paths": paths,
        "components": {
            "schemas": schemas(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                "basic": {
                    "type": "http",
                    "scheme": "basic",
                    "description": "for pages that a browser opens: the key is the password",
                },
            },
            "headers": HEADERS,
            "parameters": PARAMETERS,
            "responses": error_responses(),
        },
    }


# ---------------------------------------------------------------- operations


def _operation(operation: Operation, model: str) -> Json:
    described: Json = {
        "operationId": operation.name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "description": _description(operation),
        "responses": {"200": _success(operation, model)}
        | {
            str(status): {"$ref": f"#/components/responses/{error_name(status)}"}
            for status in operation.errors
        },
    }
    parameters: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in operation.path_parameters()
    ]
    if operation.request is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": _request_content(operation, operation.request, model)},
        }
        parameters.append({"$ref": "#/components/parameters/x-request-id"})
    if operation.has_deadline:
        parameters.append({"$ref": "#/components/parameters/x-request-timeout"})
    if parameters:
        described["parameters"] = parameters
    if operation.is_open:
        described["security"] = []
    elif operation.is_page:
        described["security"] = [{"basic": []}, {"bearer": []}, {"apiKey": []}, {}]
    return described


def _description(operation: Operation) -> str:
    if not operation.generates or operation.request is None:
        return operation.description
    known = operation.request.__struct_fields__
    ignored = ", ".join(f"`{name}`" for name in IGNORED)
    refused = ", ".join(f"`{name}`" for name in REFUSED if name not in known)
    return (
        f"{operation.description}\n\nIgnored and named: {ignored}.\n\n"
        f"Refused, but for values that mean nothing: {refused}."
    )


def _request_content(operation: Operation, request: type[Struct], model: str) -> Json:
    content: Json = {"schema": ref(request)}
    example = request_example(operation.name, model)
    return content if example is None else {**content, "example": example}


def _success(operation: Operation, model: str) -> Json:
    content: Json = {media: {"schema": {"type": "string"}} for media in operation.media_types}
    if operation.answer is not None:
        body: Json = {"schema": ref(operation.answer)}
        if (example := answer_example(operation.name, model)) is not None:
            body["example"] = example
        content["application/json"] = body
    if operation.events:
        content["text/event-stream"] = {"schema": _events(operation.events)}
    names = [*_ON_EVERY_ANSWER, *(QUOTA_HEADERS if operation.method == "POST" else ())]
    return {"description": operation.result, "content": content, "headers": header_refs(names)}


def _events(events: Sequence[type[Struct]]) -> Json:
    """OpenAPI 3.1 has no word for a stream of events; this describes the data of each."""
    return {
        "description": (
            "With `stream`: server-sent events, each with one of these as its `data`. The last one"
            " is `data: [DONE]`. A failure after the stream began is an event with `error` in place"
            " of a finish reason."
        ),
        "oneOf": [ref(event) for event in events],
    }
