"""Every row of the error table by the official SDK: its exception, code, field, and retries.

The engine is scripted, so that each failure happens when it is told to.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from access.keys import plain_keys
from clients.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineClientError,
    EngineUnavailable,
    FieldViolation,
    InternalError,
    InvalidRequest,
    OutOfMemory,
    QueueFull,
    SlowReader,
)
from clients.testing import Accept, Hang, Script
from http_facade.edge import EdgeConfig
from tests.facade_harness import MODEL, Harness, facade_and_fake

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "secret-key"
MAX_RETRIES = 1
MAX_BODY_BYTES = 20_000


@dataclass
class Sdk:
    client: AsyncOpenAI
    attempts: list[float] = field(default_factory=list)  # when each was sent

    async def count(self, request: httpx2.Request) -> None:
        self.attempts.append(time.monotonic())

    async def ask(self, *, model: str = MODEL, stream: bool = False, **fields: Any) -> None:
        headers = fields.pop("headers", None)
        answer = await self.client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hi"}],
            stream=stream,
            extra_body=fields,
            extra_headers=headers,
        )
        if isinstance(answer, openai.AsyncStream):
            async for _ in answer:
                pass


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared(embedded_model_dir: Path) -> AsyncIterator[Harness]:
    edge = EdgeConfig(api_keys=plain_keys([KEY]))
    async with facade_and_fake(
        embedded_model_dir, edge=edge, max_body_bytes=MAX_BODY_BYTES
    ) as harness:
        yield harness


@pytest.fixture
def facade(shared: Harness) -> Harness:
    shared.reset()
    shared.say("Hello")
    return shared


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(facade: Harness) -> AsyncIterator[Sdk]:
    sent: list[Sdk] = []

    async def count(request: httpx2.Request) -> None:
        await sent[0].count(request)

    async with AsyncOpenAI(
        base_url=facade.url + "/v1",
        api_key=KEY,
        max_retries=MAX_RETRIES,
        http_client=DefaultAsyncHttpxClient(event_hooks={"request": [count]}),
    ) as client:
        sent.append(Sdk(client))
        yield sent[0]


async def raised(asking: Awaitable[object]) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await asking
    error = caught.value
    assert isinstance(error.body, dict) and error.body["message"] in error.message
    assert error.request_id
    return error


# ---------------------------------------------------------------- refused at the door: asked once


Case = Callable[[Sdk], Awaitable[object]]

DOOR: list[tuple[str, Case, type[openai.APIStatusError], int, str, str | None]] = [
    ("bad field", lambda sdk: sdk.ask(temperature=3), openai.BadRequestError, 400,
     "invalid_value", "temperature"),
    ("bad type", lambda sdk: sdk.ask(top_p="x"), openai.BadRequestError, 400,
     "invalid_value", "top_p"),
    ("refused field", lambda sdk: sdk.ask(web_search_options={"a": 1}), openai.BadRequestError, 400,
     "unsupported_parameter", "web_search_options"),
    ("bad form", lambda sdk: sdk.ask(response_format={"type": "xml"}), openai.BadRequestError, 400,
     "invalid_value", "response_format.type"),
    ("too long", lambda sdk: sdk.ask(messages=[{"role": "user", "content": "x y " * 4_900}]),
     openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    ("wrong key", lambda sdk: sdk.ask(headers={"Authorization": "Bearer wrong"}),
     openai.AuthenticationError, 401, "invalid_api_key", None),
    ("unknown model", lambda sdk: sdk.ask(model="nothing"), openai.NotFoundError, 404,
     "model_not_found", "model"),
    ("unknown path", lambda sdk: sdk.client.post("/nothing", cast_to=object),
     openai.NotFoundError, 404, "not_found", None),
    ("wrong method", lambda sdk: sdk.client.get("/chat/completions", cast_to=object),
     openai.APIStatusError, 405, "method_not_allowed", None),
    ("body too large", lambda sdk: sdk.ask(user="x" * MAX_BODY_BYTES), openai.APIStatusError, 413,
     "request_too_large", None),
    ("wrong content type", lambda sdk: sdk.ask(headers={"Content-Type": "text/plain"}),
     openai.APIStatusError, 415, "unsupported_media_type", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ask", "exception", "status", "code", "param"),
    [case[1:] for case in DOOR],
    ids=[case[0] for case in DOOR],
)
async def test_what_is_refused_at_the_door_is_asked_once(
    facade: Harness,
    sdk: Sdk,
    ask: Case,
    exception: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
) -> None:
    error = await raised(ask(sdk))
    assert type(error) is exception
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert len(sdk.attempts) == 1
    assert facade.fake.calls == []


# ---------------------------------------------------------------- what the engine answers


ENGINE: list[tuple[EngineClientError, type[openai.APIStatusError], int, str, int]] = [
    (InvalidRequest("bad", field_violations=(FieldViolation("sampling.seed", "is odd"),)),
     openai.BadRequestError, 400, "invalid_value", 1),
    (ContextLengthExceeded("9 of 8"), openai.BadRequestError, 400, "context_length_exceeded", 1),
    (QueueFull("full", retry_after_seconds=0.2), openai.RateLimitError, 429, "queue_full", 2),
    (DeadlineExceeded("late"), openai.InternalServerError, 504, "deadline_exceeded", 1),
    (EngineUnavailable("gone", retry_after_seconds=0.2), openai.InternalServerError, 503,
     "engine_unavailable", 2),
    (OutOfMemory("none left"), openai.InternalServerError, 503, "out_of_memory", 2),
    (SlowReader("too slow"), openai.InternalServerError, 503, "slow_reader", 2),
    (InternalError("boom"), openai.InternalServerError, 500, "internal_error", 2),
]  # fmt: skip


@pytest.mark.parametrize(
    ("error", "exception", "status", "code", "attempts"), ENGINE, ids=[case[3] for case in ENGINE]
)
async def test_what_the_engine_refuses_is_asked_again_only_where_that_may_help(
    facade: Harness,
    sdk: Sdk,
    error: EngineClientError,
    exception: type[openai.APIStatusError],
    status: int,
    code: str,
    attempts: int,
) -> None:
    facade.fake.script(Script.failing(error))
    caught = await raised(sdk.ask(stream=status != 500))  # no stream has begun: the status is real
    assert type(caught) is exception
    assert (caught.status_code, caught.code) == (status, code)
    assert len(sdk.attempts) == attempts
    if (hint := getattr(error, "retry_after_seconds", None)) is not None:
        assert float(caught.response.headers["retry-after-ms"]) == pytest.approx(hint * 1000)
        assert int(caught.response.headers["retry-after"]) >= hint
        gaps = [b - a for a, b in zip(sdk.attempts, sdk.attempts[1:], strict=False)]
        assert all(gap >= hint for gap in gaps)


async def test_a_field_that_the_engine_refuses_is_named_as_the_caller_knows_it(
    facade: Harness, sdk: Sdk
) -> None:
    facade.fake.script(Script.failing(ENGINE[0][0]))
    error = await raised(sdk.ask(seed=1))
    assert error.param == "seed" and "is odd" in error.message


async def test_a_deadline_of_the_callers_own_is_not_tried_again(facade: Harness, sdk: Sdk) -> None:
    facade.fake.script(Script((Accept(), Hang())))
    error = await raised(sdk.ask(headers={"x-request-timeout": "0.3"}))
    assert (error.status_code, error.code) == (504, "deadline_exceeded")
    assert error.response.headers["x-should-retry"] == "false"
    assert len(sdk.attempts) == 1


async def test_a_hint_that_comes_true_takes_one_more_attempt(facade: Harness, sdk: Sdk) -> None:
    tokens = Script.of_tokens(facade.tok.encode("Hello"), stop_token_id=2)
    full = Script.failing(QueueFull("full", retry_after_seconds=0.2))
    facade.fake.script(full, tokens)
    await sdk.ask()
    assert len(sdk.attempts) == 2 and sdk.attempts[1] - sdk.attempts[0] >= 0.2
