"""Real answers of every endpoint fit the schemas of /openapi.json, streamed, whole and failed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from clients.errors import (
    DeadlineExceeded,
    EngineClientError,
    EngineUnavailable,
    InternalError,
    QueueFull,
)
from clients.testing import Accept, Emit, Fail, Progress, Script
from http_facade.openapi_routes import OPERATIONS, Operation
from tests.facade_harness import CHAT, COMPLETIONS, Harness, chat, completion, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
ALL = {"return_token_ids": True, "n": 2}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    async with facade_and_fake(embedded_model_dir, max_body_bytes=100_000) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("fine")
    return shared


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def document(shared: Harness) -> dict[str, Any]:
    status, raw, _ = await shared.get("/openapi.json")
    assert status == 200
    read: dict[str, Any] = json.loads(raw)
    return read


def check(
    document: Mapping[str, Any], operation: Mapping[str, Any], status: int, media: str, body: Any
) -> None:
    answer = operation["responses"][str(status)]
    if "$ref" in answer:
        answer = document["components"]["responses"][answer["$ref"].rpartition("/")[2]]
    schema = {**answer["content"][media]["schema"], "components": document["components"]}
    Draft202012Validator(schema).validate(body)


def described(document: Mapping[str, Any], path: str, method: str = "post") -> Mapping[str, Any]:
    operation: Mapping[str, Any] = document["paths"][path][method]
    return operation


@pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.request], ids=lambda one: one.name
)
async def test_example_requests_can_be_sent_as_they_stand(
    facade: Harness, document: dict[str, Any], operation: Operation
) -> None:
    told = described(document, operation.path)
    body = told["requestBody"]["content"]["application/json"]["example"]
    status, answer, headers = await facade.post(operation.path, body)
    assert status == 200, answer
    assert "x-ignored-params" not in headers
    check(document, told, 200, "application/json", answer)


@pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.method == "GET"], ids=lambda one: one.name
)
async def test_what_is_read_is_as_described(
    facade: Harness, document: dict[str, Any], operation: Operation
) -> None:
    told = described(document, operation.path, "get")
    path = operation.path.replace("{model}", "fake").replace("{name}", "chat.js")
    status, raw, headers = await facade.get(path)
    assert status == 200
    media = headers["content-type"].partition(";")[0]
    assert media in told["responses"]["200"]["content"]
    if operation.answer is not None:
        check(document, told, 200, media, json.loads(raw))


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (CHAT, chat(), "fine"),
        (CHAT, chat(**ALL, logprobs=True, top_logprobs=2, prompt_logprobs=1), "fine"),
        (CHAT, chat(tools=[TOOL]), CALL),
        (COMPLETIONS, completion(), "fine"),
        (COMPLETIONS, completion(**ALL, echo=True, logprobs=2, prompt_logprobs=1), "fine"),
        (COMPLETIONS, completion(prompt=["a", "b"]), "fine"),
    ],
    ids=["chat", "chat with all", "chat with calls", "text", "text with all", "texts"],
)
async def test_answers_fit_whole_and_streamed(
    facade: Harness, document: dict[str, Any], path: str, body: dict[str, Any], says: str
) -> None:
    token_ids = facade.say(says)
    if body.get("n"):
        facade.fake.script(Script.of_samples([token_ids] * body["n"]))
    told = described(document, path)
    status, answer, _ = await facade.post(path, body)
    assert status == 200, answer
    check(document, told, 200, "application/json", answer)
    for options in ({}, {"include_usage": True}, {"continuous_usage_stats": True}):
        streamed = await facade.stream(path, {**body, "stream_options": options})
        assert streamed.status == 200 and streamed.num_done == 1
        for event in streamed.events:
            check(document, told, 200, "text/event-stream", event)


async def test_a_failure_in_a_stream_fits(facade: Harness, document: dict[str, Any]) -> None:
    facade.fake.script(
        Script((Accept(), Progress(), Emit([504]), Fail(InternalError("broken", reason="X"))))
    )
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        streamed = await facade.stream(path, body)
        assert "error" in streamed.events[-1]
        for event in streamed.events:
            check(document, described(document, path), 200, "text/event-stream", event)


@pytest.mark.parametrize(
    "operation", [one for one in OPERATIONS if one.request], ids=lambda one: one.name
)
async def test_errors_are_those_that_are_described(
    facade: Harness, document: dict[str, Any], operation: Operation
) -> None:
    told = described(document, operation.path)
    example = told["requestBody"]["content"]["application/json"]["example"]
    for status, body, headers in (
        (400, b"[]", {}),
        (404, {**example, "model": "none"}, {}),
        (413, b'{"a": "' + b"x" * 100_000 + b'"}', {}),
        (415, b"{}", {"content-type": "text/plain"}),
    ):
        answered, answer, _ = await facade.post(operation.path, body, headers)
        assert answered == status, answer
        check(document, told, status, "application/json", answer)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFull("full", reason="QUEUE_FULL", retry_after_seconds=2.5), 429),
        (EngineUnavailable("gone", reason="ENGINE_UNAVAILABLE"), 503),
        (DeadlineExceeded("late", reason="DEADLINE_EXCEEDED"), 504),
        (InternalError("broken", reason="X"), 500),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
async def test_failures_of_the_engine_are_described(
    facade: Harness, document: dict[str, Any], error: EngineClientError, status: int
) -> None:
    facade.fake.script(Script((Fail(error),)))
    for path, body in ((CHAT, chat()), (COMPLETIONS, completion())):
        answered, answer, headers = await facade.post(path, body)
        assert answered == status
        check(document, described(document, path), status, "application/json", answer)
        response = document["components"]["responses"][f"Error{status}"]
        assert {"retry-after-ms"} & set(response["headers"]) <= set(headers)
