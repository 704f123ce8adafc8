"""Addresses to listen on."""

from __future__ import annotations

import socket

import pytest

from engine_service.addresses import check_address, join_address


def test_joining() -> None:
    assert join_address("127.0.0.1", 80) == "127.0.0.1:80"
    assert join_address("::1", 80) == "[::1]:80"


def test_what_can_and_cannot_be_had() -> None:
    check_address("127.0.0.1", 0)
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match="in use") as caught,
    ):
        check_address("127.0.0.1", taken.getsockname()[1])
    assert caught.value.strerror
    with pytest.raises(OSError, match="assign"):
        check_address("192.0.2.1", 0)
