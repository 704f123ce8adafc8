"""CASE K8: cached prefixes are shared within one salt of one tenant, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from clients import EngineClient, Finished, GenerateRequest, StoppingCriteria
from tests.serving import Served, engine, post

COMPLETIONS = "/v1/completions"


def prompt(number: int) -> list[int]:
    """64 ids; no other number's begins like it."""
    return [20_000 + 64 * number + i for i in range(64)]


async def cached(served: Served, ids: Sequence[int], **fields: Any) -> int:
    body = {"model": served.model, "prompt": list(ids), "max_tokens": 1, **fields}
    status, answer, _ = await post(served.http, COMPLETIONS, body)
    assert status == 200, answer
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


async def test_k8_hits_only_within_the_same_salt(served: Served) -> None:
    ids = prompt(1)
    salts: list[dict[str, str]] = [
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {},
        {"cache_salt": served.model},
    ]
    for fields in salts:
        assert await cached(served, ids, **fields) == 0, fields
    for fields in salts:
        assert 48 <= await cached(served, ids, **fields) <= 63, fields
    assert 48 <= await cached(served, ids, cache_salt=None) <= 63  # the same as absent


@pytest.mark.parametrize("salt", [7, True, [], {}, "", "s" * 1_000_000], ids=lambda s: str(s)[:9])
async def test_k8_a_salt_of_wrong_type_or_size_is_refused(served: Served, salt: Any) -> None:
    body = {"model": served.model, "prompt": prompt(2), "max_tokens": 1, "cache_salt": salt}
    status, answer, _ = await post(served.http, COMPLETIONS, body)
    assert (status, answer["error"]["param"]) == (400, "cache_salt"), answer
    assert len(answer["error"]["message"]) < 500


async def test_k8_ids_whose_digits_are_alike_are_different_prompts(served: Served) -> None:
    rest = prompt(3)[:62]
    ours = {"cache_salt": "digits"}  # other tests' prompts begin with low ids, too
    assert await cached(served, [1, 23, *rest], **ours) == 0
    assert await cached(served, [12, 3, *rest], **ours) == 0
    assert 48 <= await cached(served, [1, 23, *rest], **ours) <= 63


async def cached_for(client: EngineClient, ids: Sequence[int], tenant: str, salt: str) -> int:
    request = GenerateRequest(
        prompt=ids, tenant=tenant, cache_salt=salt, stopping=StoppingCriteria(max_tokens=1)
    )
    async with client.generate(request) as stream:
        (finished,) = [event async for event in stream if isinstance(event, Finished)]
        return finished.usage.cached_tokens


async def test_k8_no_salt_reaches_another_tenants_prefixes(served: Served) -> None:
    ids = prompt(4)
    owners = [("one", ""), ("one", "s"), ("two", ""), ("two", "s"), ("", "one"), ("on", "es")]
    async with engine(served) as client:
        for tenant, salt in owners:
            assert await cached_for(client, ids, tenant, salt) == 0, (tenant, salt)
        for tenant, salt in owners:
            assert await cached_for(client, ids, tenant, salt) >= 48, (tenant, salt)
