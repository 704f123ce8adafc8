"""Whose request it is: the facade tells the engine by the API key, never by what a caller says."""

from __future__ import annotations

from pathlib import Path

from access.keys import plain_keys
from http_facade.edge import EdgeConfig
from tests.facade_harness import CHAT, COMPLETIONS, body_for, facade_and_fake

KEYS = ("secret-one", "secret-two")


async def tenants(model_dir: Path, key: str | None) -> set[str]:
    edge = EdgeConfig(api_keys=plain_keys([key] if key else []))
    async with facade_and_fake(model_dir, edge=edge) as harness:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        for path in (CHAT, COMPLETIONS):
            for extra in ({}, {"tenant": "other"}, {"cache_salt": "s"}):
                status, answer, _ = await harness.post(path, body_for(path, **extra), headers)
                assert status == 200, answer
        return {request.tenant for request in harness.fake.requests}


async def test_one_key_is_one_tenant_and_another_key_another(embedded_model_dir: Path) -> None:
    told = [await tenants(embedded_model_dir, key) for key in KEYS]
    assert [len(names) for names in told] == [1, 1]
    assert told[0] != told[1]
    for key, names in zip(KEYS, told, strict=True):
        assert key not in names
        assert "" not in names


async def test_without_keys_there_is_one_tenant_without_a_name(embedded_model_dir: Path) -> None:
    assert await tenants(embedded_model_dir, None) == {""}
