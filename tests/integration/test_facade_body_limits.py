"""A body that the facade takes never fails at the gRPC limit behind it; and nothing is fetched."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from clients.options import ClientOptions
from http_facade.flags import build_parser
from tests.facade_harness import (
    CHAT,
    COMPLETIONS,
    Harness,
    body_for,
    chat,
    check_envelope,
    facade_and_fake,
)

MIB = 2**20


def test_the_largest_body_fits_a_message() -> None:
    largest = build_parser().parse_args(["--max-body-bytes", str(63 * MIB)]).max_body_bytes
    assert largest + MIB <= ClientOptions().max_message_bytes


@pytest.mark.slow
async def test_what_the_engine_is_sent_is_no_larger_than_the_body(embedded_model_dir: Path) -> None:
    """The largest fields that go on to the engine, in the characters that grow most easily."""
    async with facade_and_fake(embedded_model_dir, max_body_bytes=63 * MIB) as facade:
        facade.say("fine")
        for text in ("é" * (30 * MIB), '"\\' * (14 * MIB), "\x7f" * (60 * MIB), "/" * (60 * MIB)):
            for fields in (
                {"response_format": schema({"type": "string", "description": text})},
                {"response_format": schema({"enum": [text]})},
                {"structured_outputs": {"choice": [text]}},
                {"structured_outputs": {"regex": text}},
            ):
                body = json.dumps(chat(**fields), ensure_ascii=False).encode()
                assert len(body) <= 63 * MIB
                assert await status_of(facade, body) in (200, 400)


async def status_of(facade: Harness, body: bytes) -> int:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            facade.url + CHAT,
            data=io.BytesIO(body),
            headers={"content-type": "application/json"},
        ) as answer,
    ):
        await answer.read()
        return answer.status


def schema(document: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": document}}


async def test_no_url_is_ever_fetched(embedded_model_dir: Path) -> None:
    asked: list[str] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readline()).decode())
        writer.close()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/picture.png"
    parts: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "input_image", "image_url": url},
        {"type": "file", "file": {"file_id": url}},
        {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
    ]
    async with server, facade_and_fake(embedded_model_dir) as facade:
        facade.say("fine")
        for part in parts:
            content = [{"type": "text", "text": "Look:"}, part]
            status, answer, _ = await facade.post(
                CHAT, chat(messages=[{"role": "user", "content": content}])
            )
            error = check_envelope(status, answer, 400)
            assert error["param"].startswith("messages[0].content")
        # an address in a text is a text, and a schema's reference is not followed
        body = chat(messages=[{"role": "user", "content": url}])
        assert (await facade.post(CHAT, body))[0] == 200
        reference = body_for(COMPLETIONS, response_format=schema({"$ref": url}))
        status, answer, _ = await facade.post(COMPLETIONS, reference)
        assert status in (200, 400)  # the engine is a scripted one: it refuses no schema
        assert len(facade.fake.calls) <= 2
    assert asked == []
