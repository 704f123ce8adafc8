"""What is known about one HTTP request while it runs; the access log and the metrics read it."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web

from access.keys import ApiKey
from access.limits import Allowance
from http_facade.body_memory import BodyShare

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RETRY_COUNT = re.compile(r"[0-9]{1,4}")
_ID_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


@dataclass(slots=True)
class RequestState:
    answer_id: str  # ours, unique
    request_id: str  # the caller's x-request-id where it is valid, else the answer's id
    started: float = field(default_factory=time.monotonic)  # seconds
    key: ApiKey | None = None  # the caller's; None: keys are not asked for
    attempt: int | None = None  # of the caller, from 1; None: it doesn't say
    tenant: str = ""  # whose request it is, by that key
    allowance: Allowance | None = None  # of the key's limits
    body_share: BodyShare | None = None  # of the memory for bodies; None: nothing was read
    ignored: tuple[str, ...] = ()  # fields for x-ignored-params
    operation: str = ""  # chat, text_completion; empty: no generation
    model: str = ""  # a served name, never what a caller made up
    prompt_tokens: int = 0
    completion_tokens: int = 0
    has_begun: bool = False  # the engine has worked on it
    ttft_seconds: float | None = None  # first content written, since `started`; streams only
    prepared_seconds: float | None = None  # the prompt's tokens are there, since `started`
    first_content_seconds: float | None = None  # as ttft_seconds, and of whole answers: is there
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str = ""  # also of a failure after the stream began
    prompt: object = None  # as the caller sent it, kept only for an access log that shows prompts

    def priority(self, asked: int | None) -> int | None:
        """What the key allows of it."""
        return asked if self.key is None else self.key.priority(asked)

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started


STATE: web.RequestKey[RequestState] = web.RequestKey("state", RequestState)


def _attempt(request: web.BaseRequest) -> int | None:
    """As OpenAI's and Anthropic's clients count their retries."""
    given = request.headers.get("x-stainless-retry-count", "")
    return int(given) + 1 if _RETRY_COUNT.fullmatch(given) else None


def new_state(request: web.BaseRequest) -> RequestState:
    answer_id = _ID_PREFIXES.get(request.path, "req-") + secrets.token_hex(16)
    given = request.headers.get("x-request-id", "")
    request_id = given if _VALID_REQUEST_ID.fullmatch(given) else answer_id
    return RequestState(answer_id, request_id, attempt=_attempt(request))
