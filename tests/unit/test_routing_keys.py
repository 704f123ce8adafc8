"""The keys that requests are routed by: an engine's own names of the same blocks."""

from __future__ import annotations

import pytest

from engine_service.block_hash import hash_block, root_hash
from engine_service.cache_salt import effective_cache_salt
from http_facade.prefix_key import BLOCK_TOKENS, hint_key, prefix_key


def key(token_ids: list[int], tenant: str = "", cache_salt: str = "") -> bytes | None:
    return prefix_key(token_ids, tenant=tenant, cache_salt=cache_salt)


@pytest.mark.parametrize(("tenant", "salt"), [("", ""), ("acme", ""), ("", "s"), ("acme", "é s")])
@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(16, 1), (31, 1), (32, 2), (63, 2), (64, 4), (5000, 4)]
)
def test_a_key_is_the_engines_name_of_the_first_blocks(
    num_tokens: int, num_blocks: int, tenant: str, salt: str
) -> None:
    token_ids = [7 * i % 49152 for i in range(num_tokens)]
    name = root_hash(effective_cache_salt(tenant, salt))
    for start in range(0, num_blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        name = hash_block(name, token_ids[start : start + BLOCK_TOKENS])
    assert key(token_ids, tenant, salt) == name


def test_a_prompt_without_a_full_block_has_no_key() -> None:
    assert key([]) is None
    assert key([1] * 15) is None


def test_one_system_prompt_with_different_questions_is_one_key() -> None:
    system = list(range(100, 170))
    assert key([*system, 1, 2, 3]) == key([*system, *range(4000)])


def test_different_system_prompts_behind_one_template_opening_are_different_keys() -> None:
    opening = list(range(25))
    keys = {key([*opening, *([number] * 200)]) for number in range(50)}
    assert len(keys) == 50


def test_tenants_and_salts_that_share_no_cache_share_no_key() -> None:
    prompt = list(range(64))
    pairs = [("", ""), ("a", ""), ("a", "bc"), ("ab", "c"), ("", "a")]
    assert len({key(prompt, *pair) for pair in pairs}) == len(pairs)
    assert len({hint_key("h", tenant=t, cache_salt=s) for t, s in pairs}) == len(pairs)


def test_a_hint_is_no_prefix() -> None:
    hints = {hint_key(h, tenant="", cache_salt="") for h in ("a", "b", "\ud800")}
    assert len(hints) == 3
    assert hint_key("a", tenant="", cache_salt="") == hint_key("a", tenant="", cache_salt="")
