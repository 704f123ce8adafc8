"""API keys: how they are held and found, what their file may say, and what a new one does."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import yaml

from access import new_key
from access.exposure import is_loopback
from access.key_store import KeyStore
from access.keys import ApiKey, admin_key, digest_of, find_key, plain_keys
from access.keys_file import KeysFileError, read_keys_file
from access.limits import Limits

SECRETS = ("first-secret", "second-secret", "third-secret")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_file_says_all_there_is_of_a_key(tmp_path: Path) -> None:
    path = write(
        tmp_path / "keys.yaml",
        f"""
keys:
  - id: full
    sha256: {digest_of(SECRETS[0]).hex().upper()}
    tenant: finance
    priority: {{min: -1, max: 10}}
    max_concurrent_requests: 8
    requests_per_minute: 600
    tokens_per_minute: 100000
    admin: true
    trusted: true
  - {{id: short, key: {SECRETS[1]}}}
  - {{id: classed, key: {SECRETS[2]}, priority: 3}}
""",
    )
    full, short, classed = read_keys_file(path)
    assert full == ApiKey(
        id="full",
        digest=digest_of(SECRETS[0]),
        tenant="finance",
        min_priority=-1,
        max_priority=10,
        limits=Limits(8, 600, 100_000),
        is_admin=True,
        is_trusted=True,
    )
    assert short == ApiKey(id="short", digest=digest_of(SECRETS[1]), tenant="short")
    assert (classed.min_priority, classed.max_priority) == (3, 3)
    for key, secret in zip((full, short, classed), SECRETS, strict=True):
        assert find_key(secret, (full, short, classed)) is key
        assert secret not in repr(key) and digest_of(secret).hex() not in repr(key)
    assert find_key("none-of-them", (full, short, classed)) is None
    assert find_key("", (full, short, classed)) is None


def test_json_is_read_as_well(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", json.dumps({"keys": [{"id": "a", "key": "k"}]}))
    assert [key.id for key in read_keys_file(path)] == ["a"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("keys: [", "is not YAML: line 1"),
        ("", "Expected `object`"),
        ("[]", "Expected `object`"),
        ("keys: {}", "Expected `array`"),
        ("keys: [{id: a}]", "the key 'a': needs either `sha256` or `key`"),
        ("keys: [{id: a, key: topsecret, sha256: aa}]", "needs either"),
        ("keys: [{id: a, sha256: aa}]", "the key 'a': sha256 has 64 hexadecimal digits"),
        ("keys: [{id: a b, key: topsecret}]", "an id has 1 to 128 letters"),
        ("keys: [{id: a, key: topsecret, tenant: ''}]", "a tenant has 1 to 128"),
        ("keys: [{id: a, key: two words}]", "printable ASCII"),
        ("keys: [{id: a, key: topsecret, limit: 3}]", "unknown field `limit`"),
        ("keys: [{id: a, key: topsecret, requests_per_minute: 0}]", "$.keys[0].requests_per"),
        ("keys: [{id: a, key: topsecret, tokens_per_minute: many}]", "tokens_per_minute"),
        ("keys: [{id: a, key: topsecret, admin: 1}]", "$.keys[0].admin"),
        ("keys: [{id: a, key: topsecret, priority: 10000}]", "priority"),
        ("keys: [{id: a, key: topsecret, priority: {min: 2, max: 1}}]", "min is above max"),
        ("keys: [{id: a, key: topsecret}, {id: a, key: other}]", "two keys have the id 'a'"),
        ("keys: [{id: a, key: topsecret}, {id: b, key: topsecret}]", "the key 'b' is the same"),
    ],
)
def test_a_file_that_cannot_be_used_says_why_and_shows_no_key(
    tmp_path: Path, text: str, says: str
) -> None:
    path = write(tmp_path / "keys.yaml", text)
    with pytest.raises(KeysFileError) as caught:
        read_keys_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and says in message
    assert "topsecret" not in message


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(KeysFileError, match="can't be read"):
            read_keys_file(path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(KeysFileError, match="not UTF-8"):
        read_keys_file(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    ("lowest", "highest", "asked", "gets"),
    [
        (None, None, None, None),
        (None, None, -7, -7),
        (0, None, -7, 0),
        (0, None, None, 0),
        (0, 5, 9, 5),
        (3, 3, None, 3),
        (None, -2, None, -2),
    ],
)
def test_a_priority_is_clamped(
    lowest: int | None, highest: int | None, asked: int | None, gets: int | None
) -> None:
    key = ApiKey("k", b"", "t", min_priority=lowest, max_priority=highest)
    assert key.priority(asked) == gets


# ---------------------------------------------------------------- the store


def test_what_closes_an_edge(tmp_path: Path) -> None:
    operators = admin_key(digest_of("op"))
    empty = write(tmp_path / "keys.yaml", "keys: []")
    assert not KeyStore().is_required
    only_admin = KeyStore(extra_keys=(operators,))
    assert not only_admin.is_required and only_admin.has_admin
    assert KeyStore(plain_keys(["k"])).is_required
    nobody = KeyStore(path=empty)  # a file without keys lets nobody in
    assert nobody.is_required and nobody.find("k") is None
    both = KeyStore(plain_keys(["k"]), extra_keys=(operators,))
    assert both.find("op") is operators


def test_plain_keys_are_tenants_of_their_own() -> None:
    one, two = plain_keys(["a", "b"])
    assert one.tenant != two.tenant
    assert plain_keys(["b"])[0].tenant == two.tenant  # wherever it is given
    assert {key.id for key in (one, two)} == {"api-key-1", "api-key-2"}
    assert len(plain_keys(["a", "a"])) == 1


def test_a_changed_file_is_taken_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "keys.yaml", "keys: [{id: a, key: old}]")
    store = KeyStore(plain_keys(["fixed"]), path=path)
    write(path, "keys: [{id: a, key: new}]")
    store.reload()
    assert store.find("old") is None
    assert store.find("new") is not None and store.find("fixed") is not None
    write(path, "keys: [{id: a, key: newest-but-broken")
    with caplog.at_level(logging.ERROR):
        store.reload()
    assert "the API keys stay as they were" in caplog.text and "line 1" in caplog.text
    assert "newest" not in caplog.text
    assert store.find("new") is not None
    path.unlink()
    store.reload()
    assert store.find("new") is not None


def test_a_start_with_a_broken_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysFileError):
        KeyStore(path=write(tmp_path / "keys.yaml", "keys: ["))


# ---------------------------------------------------------------- a new key


def test_a_new_key_fits_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_key.main(["new", "--id=1e5", "--tenant=007", "--tokens-per-minute=9"]) == 0
    printed = capsys.readouterr()
    (secret,) = [word for word in printed.err.split() if word.startswith("ft-")]
    assert secret not in printed.out and len(secret) > 40
    path = write(tmp_path / "keys.yaml", "keys:\n" + printed.out)
    assert isinstance(yaml.safe_load(path.read_text())["keys"][0]["tenant"], str)
    (key,) = read_keys_file(path)
    assert (key.id, key.tenant, key.limits) == ("1e5", "007", Limits(tokens_per_minute=9))
    assert find_key(secret, [key]) is key


def test_names_that_no_file_takes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("--id=a b", "--tenant=", "--requests-per-minute=0"):
        with pytest.raises(SystemExit) as caught:
            new_key.main(["new", flag])
        assert caught.value.code == 2
        assert flag.partition("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "[::1]", "localhost"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", os.uname().nodename or "h"])
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)
