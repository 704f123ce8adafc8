"""The client's side of Control, against a scripted engine."""

from __future__ import annotations

import pytest

from clients import ClientOptions, EngineClient, PermissionDenied, Unauthenticated
from clients.testing import FakeEngine


async def test_each_credential_goes_where_it_belongs() -> None:
    keys = iter(("first", "second"))
    async with FakeEngine(token="token", admin_key="first") as fake:
        options = ClientOptions(token="token", admin_key=lambda: next(keys))
        async with EngineClient(fake.target, options=options) as client:
            await client.get_load()
            assert await client.flush_prefix_cache() == 0
            fake.admin_key = "second"  # rotated: the provider is asked for each call
            assert await client.drain() == 0
            assert not (await client.get_load()).ready
        async with EngineClient(fake.target, options=ClientOptions(token="second")) as client:
            with pytest.raises(PermissionDenied):
                await client.flush_prefix_cache()
            with pytest.raises(Unauthenticated):
                await client.get_load()


async def test_a_fake_without_an_admin_key_is_closed() -> None:
    async with FakeEngine() as fake:
        async with EngineClient(fake.target, options=ClientOptions(admin_key="k")) as client:
            with pytest.raises(PermissionDenied):
                await client.drain()
        assert fake.is_serving


def test_the_admin_key_stays_out_of_reprs() -> None:
    assert "hunter" not in repr(ClientOptions(admin_key="hunter2"))
