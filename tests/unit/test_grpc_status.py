"""Every error has a code and carries its details."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from engine_service.errors import ERRORS_BY_REASON, EngineError, InvalidRequest, QueueFull
from engine_service.grpc_status import CODES, to_status
from protos import engine_pb2 as pb


def details(error: EngineError) -> tuple[grpc.Status, status_pb2.Status]:
    status = to_status(error)
    ((_, value),) = status.trailing_metadata
    rich = status_pb2.Status.FromString(value)
    assert (rich.code, rich.message) == (status.code.value[0], status.details)
    return status, rich


@pytest.mark.parametrize("reason", sorted(ERRORS_BY_REASON))
def test_every_error_maps_to_a_code_and_a_reason_of_the_proto(reason: str) -> None:
    assert reason in set(pb.ErrorReason.keys())
    status, rich = details(ERRORS_BY_REASON[reason]("why"))
    assert status.details == "why"
    info = error_details_pb2.ErrorInfo()
    assert rich.details[0].Unpack(info)
    assert (info.reason, info.domain) == (reason, "firsttoken")


def test_no_code_without_an_error() -> None:
    assert set(CODES) == set(ERRORS_BY_REASON)


def test_a_field_violation() -> None:
    status, rich = details(InvalidRequest("too hot", field="sampling.temperature"))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    bad = error_details_pb2.BadRequest()
    assert rich.details[1].Unpack(bad)
    (violation,) = bad.field_violations
    assert (violation.field, violation.description) == ("sampling.temperature", "too hot")


def test_a_retry_hint() -> None:
    status, rich = details(QueueFull("full", retry_after_seconds=1.25))
    assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry = error_details_pb2.RetryInfo()
    assert rich.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1_250
    assert len(rich.details) == 2


@pytest.mark.parametrize("text", ["x" * 9000, "\u20ac" * 9000, "\ud800" * 9000])
def test_whatever_a_caller_wrote_the_status_gets_through(text: str) -> None:
    status, _ = details(InvalidRequest(text, field=text))
    assert status.code is grpc.StatusCode.INVALID_ARGUMENT
    ((_, value),) = status.trailing_metadata
    assert 3 * len(status.details.encode()) + 4 / 3 * len(value) < 8 * 1024  # gRPC's soft limit
