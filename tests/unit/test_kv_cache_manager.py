"""Which blocks a request gets, which prefix it finds, and that its books are provably right."""

from __future__ import annotations

import hashlib

import pytest

from engine_service import kv_cache_manager as module
from engine_service.block_hash import hash_block, root_hash
from engine_service.block_pool import BlockPoolCorrupted
from engine_service.kv_cache_manager import KVCacheManager
from engine_service.request import Request
from tests.core_fakes import make_request
from tests.kv_requests import admit, cached_tokens, compute, leave


def test_600_tokens_need_38_blocks_of_16() -> None:
    kv = KVCacheManager(block_size=16, num_blocks=64)
    request = make_request(prompt=range(600))
    assert kv.allocate_slots(request, 600) is not None
    assert list(kv.block_ids(request)) == list(range(38))
    assert kv.pool.num_used == 38


def test_40_gb_hold_501_requests_of_600_tokens_in_place_of_74_reservations_of_4096() -> None:
    num_blocks = 40_000_000_000 // (131_072 * 16)
    assert num_blocks // -(-4096 // 16) == 74
    kv = KVCacheManager(block_size=16, num_blocks=num_blocks, enable_caching=False)
    num_admitted = 0
    while kv.allocate_slots(make_request(str(num_admitted), range(600)), 600) is not None:
        num_admitted += 1
    assert num_admitted == 501


def test_a_request_grows_by_a_block_when_the_last_one_is_full() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    request = make_request(prompt=range(6))
    assert kv.allocate_slots(request, 6) is not None
    grown = []
    for _ in range(6):
        compute(kv, request)
        request.append_output(50)
        new = kv.allocate_slots(request, 1)
        assert new is not None
        grown.append([block.block_id for block in new])
    assert grown == [[], [], [2], [], [], []]
    assert list(kv.block_ids(request)) == [0, 1, 2]


def test_what_does_not_fit_changes_nothing() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    first, second = make_request("a", range(9)), make_request("b", range(20, 25))
    assert admit(kv, first) == 0
    assert admit(kv, second) is None
    kv.check_integrity([first])
    assert (kv.pool.num_free, kv.pool.num_used) == (1, 3)
    first.num_computed_tokens = 9
    assert kv.allocate_slots(first, 8) is None
    assert list(kv.block_ids(first)) == [0, 1, 2]


def test_spare_blocks_stay_available() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    request = make_request(prompt=range(8))
    assert kv.allocate_slots(request, 8, num_spare_blocks=3) is None
    assert kv.allocate_slots(request, 8, num_spare_blocks=2) is not None


def test_hits_do_not_count_as_available_for_the_rest() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    first = make_request("a", range(9))
    admit(kv, first)
    compute(kv, first)
    leave(kv, first)
    longer = make_request("b", range(17))  # 2 blocks are cached, 3 more needed, 4 in all
    assert admit(kv, longer) is None
    assert (kv.pool.num_free, kv.pool.num_cached) == (1, 3)
    fits = make_request("c", range(16))
    assert admit(kv, fits) == 8
    assert list(kv.block_ids(fits)) == [0, 1, 3, 2]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 48])
def test_a_full_hit_leaves_the_last_token_to_compute(length: int) -> None:
    kv = KVCacheManager(block_size=16, num_blocks=16)
    for round_number in range(3):
        request = make_request(prompt=range(length))
        assert admit(kv, request) == (0 if round_number == 0 else length - 1)
        compute(kv, request)
        leave(kv, request)
        kv.check_integrity([])


def test_a_block_is_found_once_it_is_full_and_computed() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first, second = make_request("a", range(9)), make_request("b", range(9))
    admit(kv, first)
    assert cached_tokens(kv, second) == 0
    for num_computed_tokens, found in ((3, 0), (4, 1), (7, 1), (8, 2), (9, 2)):
        first.num_computed_tokens = num_computed_tokens
        kv.cache_blocks(first, num_computed_tokens)
        assert len(kv.get_computed_blocks(second).blocks) == found


def test_blocks_of_a_request_that_left_before_they_were_computed_are_not_found() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first = make_request("a", range(9))
    admit(kv, first)
    leave(kv, first)
    assert cached_tokens(kv, make_request("b", range(9))) == 0
    assert kv.pool.num_free == 8


def test_generated_tokens_are_cached_too() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first = make_request("a", [1, 2, 3])
    admit(kv, first)
    for token in (4, 5, 6, 7, 8):
        compute(kv, first)
        first.append_output(token)
        assert kv.allocate_slots(first, 1) is not None
    leave(kv, first)
    assert cached_tokens(kv, make_request("b", [1, 2, 3, 4, 5, 6, 7, 8])) == 7


def test_a_prefix_in_use_is_shared() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=16)
    first, second = make_request("a", range(9)), make_request("b", [*range(8), 77, 78])
    admit(kv, first)
    compute(kv, first)
    assert admit(kv, second) == 8
    assert (list(kv.block_ids(first)), list(kv.block_ids(second))) == ([0, 1, 2], [0, 1, 3])
    leave(kv, first)
    kv.check_integrity([second])
    assert kv.pool.num_used == 3


def test_a_prefix_computed_twice_is_kept_once() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    first, second = make_request("a", range(9)), make_request("b", range(9))
    admit(kv, first)
    admit(kv, second)
    assert list(kv.block_ids(second)) == [3, 4, 5]
    live_table = kv.block_ids(second)
    compute(kv, first)
    compute(kv, second)
    assert list(live_table) == [0, 1, 5]
    kv.check_integrity([first, second])
    assert (kv.pool.num_used, kv.pool.num_free) == (4, 4)


def test_eviction_shortens_a_prefix_from_its_end() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    first = make_request("a", range(16))
    admit(kv, first)
    compute(kv, first)
    leave(kv, first)
    assert kv.allocate_slots(make_request("other", range(50, 58)), 8) is not None
    assert cached_tokens(kv, make_request("b", range(16))) == 8


def test_no_hit_across_salts_and_a_hit_within_one() -> None:
    kv = KVCacheManager(block_size=16, num_blocks=64)
    first = make_request("a", range(64), cache_salt="a")
    admit(kv, first)
    compute(kv, first)
    leave(kv, first)
    salts = {"a": 63, "b": 0, "": 0, "a\0": 0, "aa": 0}
    found = {s: cached_tokens(kv, make_request("x", range(64), cache_salt=s)) for s in salts}
    assert found == salts


def test_token_ids_are_not_run_together() -> None:
    kv = KVCacheManager(block_size=2, num_blocks=8)
    first = make_request("a", [1, 23, 4])
    admit(kv, first)
    compute(kv, first)
    assert cached_tokens(kv, make_request("b", [12, 3, 4])) == 0
    assert cached_tokens(kv, make_request("c", [1, 23, 5])) == 2


def test_block_hashes_are_the_same_in_every_engine() -> None:
    """Routers compute them too: this encoding is a promise."""
    assert root_hash("") == hashlib.sha256(bytes(8)).digest()
    salted = bytes([2, 0, 0, 0]) + b"s1" + bytes([4, 0, 0, 0]) + b"lora"
    assert root_hash("s1", "lora") == hashlib.sha256(salted).digest()
    tokens = bytes([1, 0, 0, 0]) + bytes([0x11, 0x22, 1, 0])
    assert hash_block(root_hash(""), [1, 0x12211]) == (
        hashlib.sha256(root_hash("") + tokens).digest()
    )
    assert hash_block(root_hash("tenant"), range(16)).hex() == (
        "726f5bb164c756f131e0bb4786a62bf2860b9207d3ca8773137d2a7835acc9c4"
    )


def test_salt_and_adapter_have_separate_key_spaces() -> None:
    pairs = [("", ""), ("x", ""), ("", "x"), ("x", "x"), ("xx", ""), ("", "xx")]
    assert len({root_hash(salt, adapter) for salt, adapter in pairs}) == len(pairs)


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[int]] = []

    def counting(parent: bytes, token_ids: list[int]) -> bytes:
        hashed.append(list(token_ids))
        return hash_block(parent, token_ids)

    monkeypatch.setattr(module, "hash_block", counting)
    kv = KVCacheManager(block_size=4, num_blocks=8)
    request = make_request("a", range(10))
    for _ in range(3):
        admit(kv, request)
        compute(kv, request)
        leave(kv, request)
    assert hashed == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_without_caching_nothing_is_hashed_shared_or_counted() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=8, enable_caching=False)
    for _ in range(2):
        request = make_request("a", range(9))
        assert admit(kv, request) == 0
        compute(kv, request)
        kv.check_integrity([request])
        assert request.block_hashes == []
        leave(kv, request)
    assert (kv.pool.num_cached, kv.num_queried_tokens, kv.num_hit_tokens) == (0, 0, 0)


def test_hits_are_counted_once_per_admitted_request() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=3)
    first = make_request("a", range(9))
    admit(kv, first)
    compute(kv, first)
    blocked = make_request("b", range(50, 59))
    assert admit(kv, blocked) is None
    leave(kv, first)
    again = make_request("c", range(9))
    admit(kv, again)
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (18, 8)
    leave(kv, again)
    again.num_preemptions = 1
    admit(kv, again)
    assert (kv.num_queried_tokens, kv.num_hit_tokens) == (18, 8)


def test_freeing_a_request_without_blocks_is_no_error() -> None:
    kv = KVCacheManager(block_size=4, num_blocks=4)
    kv.free(make_request())
    kv.check_integrity([])


def test_a_block_needs_a_token() -> None:
    with pytest.raises(ValueError, match="block_size"):
        KVCacheManager(block_size=0, num_blocks=4)


def two_requests() -> tuple[KVCacheManager, list[Request]]:
    kv = KVCacheManager(block_size=4, num_blocks=8)
    requests = [make_request("a", range(9)), make_request("b", range(40, 46))]
    for request in requests:
        admit(kv, request)
        compute(kv, request)
    kv.check_integrity(requests)
    return kv, requests


def test_integrity_wants_the_running_requests_to_hold_the_blocks() -> None:
    kv, requests = two_requests()
    with pytest.raises(BlockPoolCorrupted, match="other requests"):
        kv.check_integrity(requests[:1])


def test_integrity_finds_a_leaked_reference() -> None:
    kv, requests = two_requests()
    kv.pool.touch([kv.pool._blocks[0]])
    with pytest.raises(BlockPoolCorrupted, match="reference counts"):
        kv.check_integrity(requests)


def test_integrity_finds_a_foreign_block_in_a_table() -> None:
    kv, requests = two_requests()
    kv.block_ids(requests[0])[0] = 7
    with pytest.raises(BlockPoolCorrupted, match="block ids"):
        kv.check_integrity(requests)


def test_integrity_finds_tokens_that_are_known_before_they_are_computed() -> None:
    kv, requests = two_requests()
    requests[0].num_computed_tokens = 7
    with pytest.raises(BlockPoolCorrupted, match="other tokens than its computed"):
        kv.check_integrity(requests)


def test_integrity_finds_changed_tokens() -> None:
    kv, requests = two_requests()
    requests[1].token_ids[2] += 1
    with pytest.raises(BlockPoolCorrupted, match="hash"):
        kv.check_integrity(requests)


def test_integrity_finds_a_block_in_the_making_in_two_tables() -> None:
    kv, requests = two_requests()
    for table in kv._tables.values():
        table.is_private = True
    kv.pool.forget_all()
    ours, theirs = (kv._tables[request.key] for request in requests)
    kv.pool.touch([theirs.blocks[1]])
    kv.pool.free([ours.blocks[2]])
    ours.blocks[2], ours.block_ids[2] = theirs.blocks[1], theirs.block_ids[1]
    with pytest.raises(BlockPoolCorrupted, match="in the making is shared"):
        kv.check_integrity(requests)


def test_integrity_finds_a_copy_to_the_wrong_place() -> None:
    kv, requests = two_requests()
    twin = make_request("c", range(40, 46))
    admit(kv, twin)
    source, _ = kv._copies[twin.key]
    kv._copies[twin.key] = (source, source)
    with pytest.raises(BlockPoolCorrupted, match="copy"):
        kv.check_integrity([*requests, twin])
