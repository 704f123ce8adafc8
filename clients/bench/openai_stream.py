"""What a streamed answer of an OpenAI-compatible server says, read after its last byte came.

Nothing is decoded while answers come in: the load generator shares its machine with the server,
and an event decoded late makes no other one look late.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct

from clients.bench.answer import Answer, FailureKind, TokenUsage
from clients.bench.sse import read_events

_DONE = b"[DONE]"


class _Delta(Struct):
    content: str | None = None


class _Choice(Struct):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Error(Struct):
    message: str | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: _Error | str | None = None


class _ErrorBody(Struct):
    error: _Error | str | None = None


_event_decoder = msgspec.json.Decoder(_Event)
_error_decoder = msgspec.json.Decoder(_ErrorBody)


def read_stream(pieces: Sequence[tuple[float, bytes]], answer: Answer) -> None:
    """Fills `answer` from (seconds, bytes) as they arrived.

    A stream that was read to its end and lacks [DONE], usage or text has failed.
    """
    is_done = False
    for seconds, data in read_events(pieces):
        if data == _DONE:
            is_done = True
            continue
        try:
            event = _event_decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            answer.fail(FailureKind.BAD_STREAM, f"an event can't be read: {error}")
            return
        _take(event, seconds, answer)
    if answer.ended_seconds is None or answer.failure is not None:
        return
    if not is_done:
        answer.fail(FailureKind.NO_DONE, "the stream ended without [DONE]")
    elif answer.usage is None:
        answer.fail(FailureKind.NO_USAGE, "the stream ended without a usage block")
    elif not answer.chunk_seconds:
        answer.fail(FailureKind.NO_TEXT, "the stream ended without any text")


def _take(event: _Event, seconds: float, answer: Answer) -> None:
    if event.error is not None:
        answer.fail(FailureKind.STREAM_ERROR, _message_of(event.error))
    if event.usage is not None:
        details = event.usage.prompt_tokens_details
        answer.usage = TokenUsage(
            event.usage.prompt_tokens,
            event.usage.completion_tokens,
            None if details is None else details.cached_tokens,
        )
    has_text = False
    for choice in event.choices or ():
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            has_text = True
            answer.texts.append(text)
        if choice.finish_reason is not None:
            answer.finish_reason = choice.finish_reason
    if has_text:
        answer.chunk_seconds.append(seconds)


def error_message(body: bytes) -> str:
    """What an answer other than 200 says: its envelope's message, else how the body begins."""
    try:
        error = _error_decoder.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        error = None
    if error is None:
        return body[:300].decode(errors="replace").strip() or "(no body)"
    return _message_of(error)


def _message_of(error: _Error | str) -> str:
    return (error if isinstance(error, str) else error.message or "(no message)")[:300]
