"""A real facade on a real socket in front of a scripted engine with the embedded tokenizer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from opentelemetry.trace import TracerProvider

from clients.testing import FakeEngine, Script
from clients.text.tokenizer import Tokenizer
from http_facade.engine_address import parse_engine
from http_facade.flags import FacadeConfig
from http_facade.server import RunningFacade, running_facade
from tests.serving import Stream, post, stream

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MODEL = "fake"
EOS = 2


@dataclass
class Harness:
    fake: FakeEngine
    running: RunningFacade
    tok: Tokenizer

    @property
    def url(self) -> str:
        return self.running.url

    def reset(self) -> None:
        """As new, for the next test."""
        self.fake.calls.clear()
        self.fake.aborts.clear()

    def say(self, text: str, **script: Any) -> list[int]:
        """The engine answers `text` from now on, ended by the end token; returns its tokens."""
        token_ids = self.tok.encode(text, add_special_tokens=False)
        self.fake.script(Script.of_tokens(token_ids, **{"stop_token_id": EOS, **script}))
        return token_ids

    async def post(
        self, path: str, body: object, headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        return await post(self.url, path, body, headers)

    async def stream(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Stream:
        return await stream(self.url, path, body, headers)

    async def get(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.url + path) as answer,
        ):
            return answer.status, await answer.read(), answer.headers

    async def wait_ready(self, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while (await self.get("/readyz"))[0] != 200:
            assert time.monotonic() < deadline, "the facade never became ready"
            await asyncio.sleep(0.02)

    async def send_raw(
        self, path: str, body: Mapping[str, Any]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A bare socket with the request on it: aiohttp's client hides what becomes of it."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.running.port)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


async def until(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not so in {seconds} s"
        await asyncio.sleep(0.01)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], **fields}


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once upon a time", **fields}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return chat(**fields) if path == CHAT else completion(**fields)


def prompt_ids(prompt: str | Sequence[int]) -> list[int]:
    """What a recorded request carried: the facade always sends ids."""
    assert not isinstance(prompt, str)
    return list(prompt)


def text_of(body: Mapping[str, Any], index: int = 0) -> str:
    choice = body["choices"][index]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def check_envelope(
    status: int, body: Mapping[str, Any], expected: int, param: str | None = None
) -> dict[str, Any]:
    """Returns the error; `param` is compared where it is given."""
    assert status == expected, body
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and isinstance(error["code"], str)
    for leak in ("Traceback", ".py", "<class", "object at 0x", "'>", "None"):
        assert leak not in error["message"], error
    if param is not None:
        assert error["param"] == param, error
    return error


@asynccontextmanager
async def facade_and_fake(
    model_dir: Path, *, tracer_provider: TracerProvider | None = None, **config: Any
) -> AsyncIterator[Harness]:
    async with FakeEngine(model_dir, model=MODEL) as fake:
        settings = FacadeConfig(engines=(parse_engine(fake.target),), port=0, **config)
        async with running_facade(settings, tracer_provider=tracer_provider) as running:
            harness = Harness(fake, running, Tokenizer.from_files(fake.tokenizer.files))
            await harness.wait_ready()
            yield harness
