"""One line per request, however it ended: as text or as JSON.

Keys are named by their ids; prompts are in it only where the operator asks for them, answers never.
"""

from __future__ import annotations

import logging
import sys
import time

import msgspec
from aiohttp import web

from http_facade.state import RequestState

access_log = logging.getLogger("http_facade.access")

_MAX_PATH_CHARS = 200

Fields = dict[str, object]


class AccessLog:
    def __init__(self, form: str, *, with_prompts: bool = False) -> None:
        """`form`: text, json or off."""
        self._form = form
        self._with_prompts = with_prompts

    def write(self, request: web.Request, route: str, status: int, state: RequestState) -> None:
        """`route`: ours, never what a caller made up; `status` 499: the client was gone."""
        fields = _fields(request, route, status, state)
        if self._with_prompts and state.prompt is not None:
            fields["prompt"] = state.prompt
        self._write(fields)

    def write_unrouted(self, status: int, state: RequestState) -> None:
        """Of what was no valid HTTP: nothing is known of it."""
        self._write({"id": state.request_id, "status": status, "error": state.error_code})

    def _write(self, fields: Fields) -> None:
        if self._form == "json":
            stamped = {"time": _now(), "event": "request", **fields}
            access_log.info("%s", msgspec.json.encode(stamped).decode())
        elif self._form == "text":
            access_log.info("%s", " ".join(f"{key}={_text(it)}" for key, it in fields.items()))


def _fields(request: web.Request, route: str, status: int, state: RequestState) -> Fields:
    """Only what there is."""
    fields: Fields = {"id": state.request_id}
    if state.key is not None:
        fields["key"] = state.key.id
    if state.tenant:
        fields["tenant"] = state.tenant
    fields |= {
        "method": request.method,
        "path": request.rel_url.raw_path[:_MAX_PATH_CHARS],
        "route": route,
        "status": status,
        "ms": round(state.elapsed_seconds() * 1000, 1),
    }
    if state.model:
        fields["model"] = state.model
    if state.operation:
        fields["prompt_tokens"] = state.prompt_tokens
        fields["completion_tokens"] = state.completion_tokens
    if state.ttft_seconds is not None:
        fields["ttft_ms"] = round(state.ttft_seconds * 1000, 1)
    if state.finish_reasons:
        fields["finish"] = ",".join(state.finish_reasons)
    if state.error_code:
        fields["error"] = state.error_code
    return fields


def _text(value: object) -> str:
    """One word; what is no word in JSON's quotes, where no line can be broken."""
    if isinstance(value, float):
        return f"{value:.1f}"
    if isinstance(value, str) and value.isprintable() and not set(value) & set(' "='):
        return value
    return str(value) if isinstance(value, int) else msgspec.json.encode(value).decode()


def _now() -> str:
    """UTC, in milliseconds."""
    seconds = time.time()
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def configure_access_log(form: str) -> None:
    """Lines of JSON stand alone on stderr, without the prefix of other log lines."""
    if form != "json":
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    access_log.addHandler(handler)
    access_log.setLevel(logging.INFO)
    access_log.propagate = False


ACCESS_LOG: web.AppKey[AccessLog] = web.AppKey("access_log", AccessLog)
