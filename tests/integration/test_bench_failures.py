"""`firsttoken bench` against servers that misbehave: each failure is told by its kind."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from clients import EngineUnavailable, InvalidRequest, OutOfMemory, QueueFull
from clients.bench.answer import Answer, FailureKind
from clients.bench.target import TargetError, TargetOptions
from clients.bench.targets import open_target
from clients.bench.workloads import PromptKind, PromptSource
from clients.testing import Accept, Emit, Fail, FakeEngine, Hang, Script

PROMPT = PromptSource("7", 1).prompt(PromptKind.W1, 0)

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
TEXT = b'data: {"choices":[{"index":0,"text":"a","finish_reason":null}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"
MODELS = b'{"object":"list","data":[{"id":"some-model"}]}'


def whole(status: str, body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def until_closed(body: bytes) -> bytes:
    return STREAM_HEAD + b"Connection: close\r\n\r\n" + body


def says(answer: bytes) -> Reply:
    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    return reply


async def hangs(writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + b"\r\n" + TEXT)
    await asyncio.sleep(60)


async def resets(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


class Server:
    """Lists one model, and answers every POST by `reply`, then closes the connection."""

    def __init__(self, reply: Reply, models: bytes = whole("200 OK", MODELS)) -> None:
        self.reply = reply
        self.models = models
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        if head.startswith("GET"):
            writer.write(self.models)
        else:
            length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            await self.reply(writer)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        handlers: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self.handle(reader, writer))
            handlers.add(task)
            task.add_done_callback(lambda _: writer.close())

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for handler in handlers:
                handler.cancel()
            ended = await asyncio.gather(*handlers, return_exceptions=True)
            assert [e for e in ended if isinstance(e, Exception)] == []


async def one_answer(address: str, options: TargetOptions = TargetOptions()) -> Answer:  # noqa: B008
    answer = Answer()
    async with open_target(address, options) as target:
        await target.prepare(PROMPT)(answer)
    return answer


# ---------------------------------------------------------------- HTTP


def patient_unless(hangs: bool) -> TargetOptions:
    return TargetOptions(timeout_seconds=2.5 if hangs else 60)


@pytest.mark.parametrize(
    ("reply", "name", "message"),
    [
        (
            says(whole("429 Too Many Requests", b'{"error":{"message":"full"}}')),
            "http_429",
            "full",
        ),
        (says(whole("502 Bad Gateway", b"<html>", "text/html")), "http_502", "<html>"),
        (says(whole("200 OK", b"{}")), "bad_stream", "an answer of type application/json"),
        (says(b"SSH-2.0-OpenSSH_9.2\r\n\r\n"), "bad_stream", ""),
        (says(until_closed(TEXT + USAGE)), "no_done", "without [DONE]"),
        (says(until_closed(TEXT + DONE)), "no_usage", "without a usage block"),
        (says(until_closed(USAGE + DONE)), "no_text", "without any text"),
        (says(until_closed(TEXT + b"data: {\n\n")), "bad_stream", "an event can't be read"),
        (says(until_closed(TEXT + b'data: {"error":{"message":"oh"}}\n\n')), "stream_error", "oh"),
        (says(b""), "disconnected", ""),
        (resets, "disconnected", ""),
        (
            says(STREAM_HEAD + b"Content-Length: 999\r\n\r\n" + TEXT),
            "disconnected",
            "",
        ),
        (hangs, "timeout", ""),
    ],
)
async def test_each_failure_has_its_kind(reply: Reply, name: str, message: str) -> None:
    async with Server(reply).listening() as url:
        answer = await one_answer(url, patient_unless(name == "timeout"))
    assert answer.failure is not None
    assert answer.failure.name == name
    assert message in answer.failure.message and answer.failure.message
    assert answer.ended_seconds is not None and not answer.is_ok


async def test_a_server_that_is_gone_is_unreachable() -> None:
    async with AsyncExitStack() as stack:
        async with Server(says(b"")).listening() as url:
            target = await stack.enter_async_context(open_target(url, TargetOptions()))
        answer = Answer()
        await target.prepare(PROMPT)(answer)
    assert answer.failure is not None
    assert answer.failure.kind is FailureKind.UNREACHABLE
    assert "Connect call failed" in answer.failure.message


async def test_what_is_sent_is_what_the_workload_says() -> None:
    server = Server(says(until_closed(TEXT + USAGE + DONE)))
    options = TargetOptions(api_key="k", extra_fields={"top_k": 3})
    async with server.listening() as url, open_target(f"{url}/v1/", options) as target:
        assert (target.model, target.address) == ("some-model", url)
        answer = Answer()
        await target.prepare(PROMPT)(answer)
        await target.prepare(PromptSource("7", 1).prompt(PromptKind.W4, 0))(Answer())
    assert answer.is_ok
    plain, by_schema = server.bodies
    assert plain == {
        "model": "some-model",
        "prompt": PROMPT.text,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "max_tokens": 64,
        "ignore_eos": True,
        "top_k": 3,
    }
    assert "ignore_eos" not in by_schema and "prompt" not in by_schema
    assert [head.split()[1] for head in server.heads] == [
        "/v1/models",
        "/v1/completions",
        "/v1/chat/completions",
    ]
    assert all("Authorization: Bearer k\r\n" in head for head in server.heads)


@pytest.mark.parametrize(
    ("models", "says_why"),
    [
        (whole("404 Not Found", b'{"error":{"message":"no such path"}}'), "no such path"),
        (whole("200 OK", b'{"data":[]}'), "names no model"),
        (whole("200 OK", b"hello"), "names no model"),
    ],
)
async def test_a_server_without_a_model_list_needs_to_be_told_one(
    models: bytes, says_why: str
) -> None:
    server = Server(says(until_closed(TEXT + USAGE + DONE)), models)
    async with server.listening() as url:
        with pytest.raises(TargetError, match=says_why):
            await one_answer(url)
        assert (await one_answer(url, TargetOptions(model="told"))).is_ok
    assert server.bodies[0]["model"] == "told"


# ---------------------------------------------------------------- gRPC


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (Script.failing(QueueFull("full", retry_after_seconds=0.01)), "grpc_queue_full"),
        (Script.failing(InvalidRequest("no")), "grpc_invalid_request"),
        (Script((Accept(), Emit((5,)), Fail(OutOfMemory("oh")))), "grpc_out_of_memory"),
        (Script((Accept(), Emit((5,)), Fail(EngineUnavailable("dead")))), "disconnected"),
        (Script((Accept(), Emit((5,)))), "grpc_internal_error"),
        (Script((Accept(), Hang())), "timeout"),
        (Script.of_tokens(()), "no_text"),
    ],
)
async def test_each_failure_over_grpc_has_its_kind(
    script: Script, name: str, embedded_model_dir: Path
) -> None:
    async with FakeEngine(embedded_model_dir) as fake:
        fake.script(script)
        answer = await one_answer(f"grpc://{fake.target}", patient_unless(name == "timeout"))
        assert len(fake.calls) == 1  # a refusal is counted, not tried again
    assert answer.failure is not None
    assert answer.failure.name == name


async def test_an_engine_that_is_gone_is_unreachable(embedded_model_dir: Path) -> None:
    async with FakeEngine(embedded_model_dir) as fake:
        async with open_target(f"grpc://{fake.target}", TargetOptions()) as target:
            call = target.prepare(PROMPT)
            await fake.kill()
            answer = Answer()
            await call(answer)
        assert answer.failure is not None
        assert answer.failure.kind is FailureKind.UNREACHABLE
        with pytest.raises(TargetError, match="cannot be measured"):
            await one_answer(f"grpc://{fake.target}")


async def test_merged_tokens_are_one_chunk_and_counted_by_usage(embedded_model_dir: Path) -> None:
    async with FakeEngine(embedded_model_dir) as fake:
        fake.script(Script.of_tokens((504, 28, 504, 28, 504), chunk_sizes=(1, 3, 1)))
        answer = await one_answer(f"grpc://{fake.target}", TargetOptions(api_key=None))
    assert answer.is_ok
    assert len(answer.chunk_seconds) == 3
    assert answer.completion_tokens == 5


# ---------------------------------------------------------------- the command


async def bench(*arguments: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "clients", "bench", *arguments],
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    return process.returncode, output.decode(), errors.decode()


async def test_failed_requests_are_counted_and_end_with_1() -> None:
    replies = iter(
        [
            whole("429 Too Many Requests", b'{"error":{"message":"full"}}'),
            until_closed(TEXT + USAGE + DONE),
            whole("429 Too Many Requests", b'{"error":{"message":"still full"}}'),
            until_closed(TEXT),
        ]
    )

    async def reply(writer: asyncio.StreamWriter) -> None:
        writer.write(next(replies))

    async with Server(reply).listening() as url:
        code, output, errors = await bench("--url", url, "--requests=3", "--quiet")
    assert code == 1
    assert errors == ""
    assert "1 of 3 requests answered" in output
    assert "failed: 1 http_429, the first: still full" in output
    assert "failed: 1 no_done, the first: the stream ended without [DONE]" in output


async def test_a_failed_warm_up_is_said() -> None:
    async with Server(says(whole("401 Unauthorized", b'{"error":"key?"}'))).listening() as url:
        code, _, errors = await bench("--url", url, "--requests=1")
    assert code == 1
    assert errors == "warm-up: http_401: key?\n"


@pytest.mark.parametrize("arguments", [(), ("sweep", "--itl-p99-ms=9")])
async def test_a_server_out_of_reach_ends_with_3(arguments: tuple[str, ...]) -> None:
    async with Server(says(b"")).listening() as url:
        pass
    code, output, errors = await bench(*arguments, "--url", url)
    assert (code, output) == (3, "")
    assert errors.startswith(f"firsttoken bench: {url} cannot be reached: ")
    assert len(errors.splitlines()) == 1
