"""What is known about one HTTP request while it runs; the access log and the metrics read it."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from aiohttp import web

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_ID_PREFIXES = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


@dataclass(slots=True)
class RequestState:
    answer_id: str  # ours, unique
    request_id: str  # the caller's x-request-id where it is valid, else the answer's id
    started: float = field(default_factory=time.monotonic)  # seconds
    tenant: str = ""  # whose request it is, by its API key; empty: keys are not asked for
    ignored: tuple[str, ...] = ()  # fields for x-ignored-params
    operation: str = ""  # chat, text_completion; empty: no generation
    model: str = ""  # a served name, never what a caller made up
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ttft_seconds: float | None = None  # first content written, since `started`; streams only
    finish_reasons: list[str] = field(default_factory=list)
    error_code: str = ""  # also of a failure after the stream began

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started


STATE: web.RequestKey[RequestState] = web.RequestKey("state", RequestState)


def new_state(request: web.BaseRequest) -> RequestState:
    answer_id = _ID_PREFIXES.get(request.path, "req-") + secrets.token_hex(16)
    given = request.headers.get("x-request-id", "")
    return RequestState(answer_id, given if _VALID_REQUEST_ID.fullmatch(given) else answer_id)
