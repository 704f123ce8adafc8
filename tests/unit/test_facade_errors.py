"""The error table: from the engine's typed errors to status, code, param and retry hints."""

from __future__ import annotations

import msgspec
import pytest

from clients import errors as client_errors
from clients.errors import EngineClientError, FieldViolation
from http_facade.errors import ApiError, from_engine_error, invalid, model_not_found


def translated(error: EngineClientError) -> ApiError:
    return from_engine_error(error, prompt_param="messages", model="m")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (client_errors.InvalidRequest("bad", reason="R"), 400, "invalid_value"),
        (client_errors.ContextLengthExceeded("9 > 8", reason="R"), 400, "context_length_exceeded"),
        (client_errors.ModelNotFound("no", reason="R"), 404, "model_not_found"),
        (client_errors.QueueFull("full", reason="R"), 429, "queue_full"),
        (client_errors.SlowReader("slow", reason="R"), 503, "slow_reader"),
        (client_errors.OutOfMemory("oom", reason="R"), 503, "out_of_memory"),
        (client_errors.EngineUnavailable("dead", reason="R"), 503, "engine_unavailable"),
        (client_errors.TokenizerStale("stale", reason="R"), 503, "engine_unavailable"),
        (client_errors.DeadlineExceeded("late", reason="R"), 504, "deadline_exceeded"),
        (client_errors.RequestIdInUse("id", reason="R"), 500, "internal_error"),
        # the facade's own key, not the caller's
        (client_errors.Unauthenticated("who", reason="R"), 503, "engine_unavailable"),
        (client_errors.PermissionDenied("no", reason="R"), 503, "engine_unavailable"),
        (client_errors.InternalError("boom", reason="R"), 500, "internal_error"),
    ],
)
def test_each_error_has_its_status_and_code(
    error: EngineClientError, status: int, code: str
) -> None:
    answer = translated(error)
    assert (answer.status, answer.code) == (status, code)
    body = msgspec.json.decode(msgspec.json.encode(answer.envelope()))
    assert set(body["error"]) == {"message", "type", "param", "code"}


def test_every_error_of_the_client_is_translated() -> None:
    pending = [EngineClientError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        assert 400 <= translated(kind("x")).status < 600


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.temperature", "temperature"),
        ("stopping.stop_token_ids", "stop_token_ids"),
        ("kv.cache_salt", "cache_salt"),
        ("token_ids.ids", "messages"),
        ("prompt", "messages"),
    ],
)
def test_the_engines_fields_get_the_names_of_the_api(field: str, param: str) -> None:
    violation = FieldViolation(field, "is wrong")
    answer = translated(client_errors.InvalidRequest("bad", field_violations=(violation,)))
    assert (answer.param, answer.message) == (param, f"{param}: is wrong")


def test_retry_hints_are_passed_on() -> None:
    hint = translated(client_errors.QueueFull("full", reason="R", retry_after_seconds=2.25))
    assert hint.headers["Retry-After"] == "3"
    assert hint.headers["retry-after-ms"] == "2250"
    assert hint.headers["x-should-retry"] == "true"
    assert "Retry-After" in translated(client_errors.EngineUnavailable("dead")).headers
    assert "Retry-After" in translated(client_errors.TokenizerStale("stale")).headers
    assert translated(client_errors.DeadlineExceeded("late")).headers == {"x-should-retry": "false"}
    assert translated(client_errors.OutOfMemory("oom")).headers == {}


@pytest.mark.parametrize("kind", [client_errors.EngineUnavailable, client_errors.QueueFull])
def test_the_transports_own_words_stay_inside(kind: type[EngineClientError]) -> None:
    assert "10.1.2.3" not in translated(kind("failed to connect to ipv4:10.1.2.3:50051")).message
    assert "draining" in translated(kind("draining", reason="ENGINE_UNAVAILABLE")).message


def test_messages_stay_short() -> None:
    assert len(model_not_found("x" * 10_000).message) < 300
    assert len(invalid("stop", "y" * 100_000).message) <= 2_000
