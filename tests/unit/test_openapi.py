"""/openapi.json is OpenAPI, tells of every route, and says what every field means."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from msgspec import Struct
from openapi_spec_validator import OpenAPIV31SpecValidator

from http_facade.app import create_app
from http_facade.descriptions import described_structs, description_of
from http_facade.flags import FacadeConfig
from http_facade.openapi import openapi_document
from http_facade.openapi_routes import OPERATIONS
from http_facade.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

REQUESTS: tuple[type[Struct], ...] = (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    # as a client reads it
    read: dict[str, Any] = json.loads(msgspec.json.encode(openapi_document("some-model")))
    return read


def test_the_document_is_openapi(document: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(document).validate()


async def test_every_route_is_in_the_document_and_no_other() -> None:
    app = create_app(FacadeConfig())
    routed = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("HEAD", "OPTIONS", "*")
    }
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    assert routed - described == set(), "describe them in http_facade/openapi_routes.py"
    assert described - routed == set()


def test_every_field_of_a_request_has_words_and_no_other(document: dict[str, Any]) -> None:
    for struct in (*REQUESTS, *described_structs()):
        for field in struct.__struct_fields__:
            assert description_of(struct, field), f"{struct.__name__}.{field}"
            described = document["components"]["schemas"].get(struct.__name__)
            if described is not None:
                assert described["properties"][field]["description"]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_examples_fit_their_schemas(document: dict[str, Any], operation: Any) -> None:
    described = document["paths"][operation.path][operation.method.lower()]
    contents = [described["responses"]["200"]["content"].get("application/json", {})]
    if operation.request is not None:
        contents.append(described["requestBody"]["content"]["application/json"])
        assert all("example" in content for content in contents)
    for content in contents:
        if "example" in content:
            schema = {**content["schema"], "components": document["components"]}
            Draft202012Validator(schema).validate(content["example"])


def test_what_a_request_may_say_is_what_decoding_takes(document: dict[str, Any]) -> None:
    """Types and ranges come from one place; a sample of them, as a client's generator sees it."""
    chat = document["components"]["schemas"]["ChatRequest"]
    assert chat["required"] == ["model", "messages"]
    for value, fits in (
        (0, True),
        (2, True),
        (2.1, False),
        (-1, False),
        ("1", False),
        (None, True),
    ):
        schema = {**chat["properties"]["temperature"], "components": document["components"]}
        assert Draft202012Validator(schema).is_valid(value) is fits, value
    name = document["components"]["schemas"]["FunctionDefinition"]["properties"]["name"]
    assert Draft202012Validator(name).is_valid("look_up-2")
    assert not Draft202012Validator(name).is_valid("look up")


def test_there_is_no_route_without_a_description_of_its_errors() -> None:
    for operation in OPERATIONS:
        if not operation.is_open:
            assert 401 in operation.errors
        if operation.request is not None:
            assert {400, 413, 415} <= set(operation.errors)
