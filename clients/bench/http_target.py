"""An OpenAI-compatible server. Each request has a connection of its own, whatever the server would
allow: some close it after a stream, and then others would seem quicker to connect."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter

import aiohttp
import msgspec

from clients.bench.answer import Answer, FailureKind
from clients.bench.openai_stream import error_message, read_stream
from clients.bench.target import Api, Call, TargetError, TargetOptions
from clients.bench.workloads import PERSON_SCHEMA, Prompt

_PATHS = {Api.COMPLETIONS: "/v1/completions", Api.CHAT: "/v1/chat/completions"}
_PROBE_SECONDS = 30.0
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "person", "schema": PERSON_SCHEMA, "strict": True},
}


class _Model(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_Model]


@asynccontextmanager
async def http_target(url: str, options: TargetOptions) -> AsyncIterator[HttpTarget]:
    """`url` is where the server listens, with or without `/v1`. Raises TargetError."""
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"Content-Type": "application/json"}
    if options.api_key:
        headers["Authorization"] = f"Bearer {options.api_key}"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=headers,
        timeout=aiohttp.ClientTimeout(total=options.timeout_seconds),
    ) as session:
        # Asked even where the model is known: a server out of reach is then said once.
        listed = await _listed_model(session, url, is_needed=options.model is None)
        yield HttpTarget(session, url, options.model or listed, options)


async def _listed_model(session: aiohttp.ClientSession, url: str, *, is_needed: bool) -> str:
    """The first of GET /v1/models; empty where there is none and none is needed."""
    try:
        timeout = aiohttp.ClientTimeout(total=_PROBE_SECONDS)
        async with session.get(f"{url}/v1/models", timeout=timeout) as response:
            body = await response.read()
            status = response.status
    except (aiohttp.ClientError, TimeoutError) as error:
        raise TargetError(f"{url} cannot be reached: {_told(error)}") from error
    try:
        if status == 200 and (models := msgspec.json.decode(body, type=_ModelList).data):
            return models[0].id
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass  # said below
    if is_needed:
        said = "" if status == 200 else f" (HTTP {status}: {error_message(body)})"
        raise TargetError(f"{url}/v1/models names no model{said}; give --model")
    return ""


class HttpTarget:
    """Its session belongs to `http_target`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, options: TargetOptions
    ) -> None:
        self._session = session
        self._options = options
        self.address = url
        self.model = model

    def prepare(self, prompt: Prompt) -> Call:
        api = self._options.api_for(prompt)
        body = msgspec.json.encode(self._body(prompt, api))
        return functools.partial(self._send, self.address + _PATHS[api], body)

    def _body(self, prompt: Prompt, api: Api) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": prompt.max_tokens,
        }
        if api is Api.CHAT:
            body["messages"] = [{"role": "user", "content": prompt.text}]
        else:
            body["prompt"] = prompt.text
        if prompt.has_schema:
            body["response_format"] = _RESPONSE_FORMAT
        elif self._options.is_ignoring_eos:
            body["ignore_eos"] = True
        return {**body, **self._options.extra_fields}

    async def _send(self, url: str, body: bytes, answer: Answer) -> None:
        pieces: list[tuple[float, bytes]] = []
        answer.send()
        try:
            async with self._session.post(url, data=body) as response:
                if response.status != 200 or response.content_type != "text/event-stream":
                    await _read_refusal(response, answer)
                else:
                    async for piece in response.content.iter_any():
                        pieces.append((perf_counter(), piece))
        except asyncio.CancelledError:
            read_stream(pieces, answer)
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            answer.fail(_kind_of(error), _told(error))
        answer.end()
        read_stream(pieces, answer)


async def _read_refusal(response: aiohttp.ClientResponse, answer: Answer) -> None:
    body = await response.read()
    if response.status != 200:
        answer.fail(FailureKind.REFUSED, error_message(body), f"http_{response.status}")
    else:
        said = f"an answer of type {response.content_type}, not an event stream"
        answer.fail(FailureKind.BAD_STREAM, said)


def _kind_of(error: aiohttp.ClientError | TimeoutError) -> FailureKind:
    match error:
        case aiohttp.ClientConnectorError():
            return FailureKind.UNREACHABLE
        case TimeoutError():  # aiohttp's own are among them
            return FailureKind.TIMEOUT
        case aiohttp.ClientResponseError():
            return FailureKind.BAD_STREAM  # not HTTP
        case _:
            return FailureKind.DISCONNECTED


def _told(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        error = error.os_error  # its own text speaks of aiohttp's arguments
    return str(error) or type(error).__name__
