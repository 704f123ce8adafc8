"""What several tests of single modules share."""

from __future__ import annotations

import asyncio

import pytest

from tests.virtual_time import VirtualClock


@pytest.fixture
async def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    return VirtualClock(asyncio.get_running_loop(), monkeypatch)
