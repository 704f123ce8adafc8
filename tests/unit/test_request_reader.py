"""What is read of the local trace store for one request, for a time, and for the slowest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.trace_samples import MS, A, B, C, request
from traces import names
from traces.explain.command import ttft
from traces.explain.explanation import explain
from traces.explain.ranking import rank, rank_slowest, ranking_json
from traces.request_reader import Alike, read_alike, read_named, read_since, read_slowest
from traces.request_view import join
from traces.stored_spans import StoredSpan, read_spans

HASHES = ["h16", "h32", "h64"]


def write(directory: Path, spans: Sequence[StoredSpan], *others: str) -> None:
    """In two files, as facade and engine do; `others`: lines that are no spans."""
    lines = [json.dumps(span) for span in spans]
    (directory / "a.jsonl").write_text("\n".join([*lines[::2], *others]))
    (directory / "b.jsonl").write_text("\n".join(lines[1::2]))


def named(directory: Path, name: str) -> list[str]:
    return [view.request_id for view in read_named(directory, name)]


def turn(request_id: str, at_ms: float = 0.0, waits_ms: float = 60.0) -> list[StoredSpan]:
    """One of an agent's trace."""
    spans = request(A, at_ms=at_ms, waits_ms=waits_ms)
    for span in spans:
        if names.REQUEST_ID in span["attributes"]:
            span["attributes"][names.REQUEST_ID] = f"{request_id}-engine"
    spans[0]["attributes"] |= {names.REQUEST_ID: request_id, names.GEN_AI_RESPONSE_ID: "chatcmpl-7"}
    return spans


def test_a_request_is_found_by_each_of_its_ids(tmp_path: Path) -> None:
    write(tmp_path, turn("mine") + request(B))
    for name in (A, "mine", "mine-engine", "chatcmpl-7"):
        assert named(tmp_path, name) == ["mine"]
    assert named(tmp_path, "min") == named(tmp_path, C) == []
    (view,) = read_named(tmp_path, "mine")
    assert view.call is not None and len(view.call.prefill_steps) == 1
    assert explain(view).neighbours


def test_of_a_trace_with_turns_all_or_one_are_read(tmp_path: Path) -> None:
    write(tmp_path, turn("one") + turn("two", at_ms=500) + request(B))
    assert named(tmp_path, A) == ["one", "two"]
    assert named(tmp_path, "two") == ["two"]


def test_of_a_store_only_what_begins_alike_is_read(tmp_path: Path) -> None:
    spans = request(A, hashes=HASHES) + request(B, at_ms=1_000, hashes=HASHES, salt="other")
    write(tmp_path, spans + request(C, at_ms=500, hashes=["else"]), '{"trace_id": "torn')
    (view,) = read_named(tmp_path, B)
    alike = read_alike(tmp_path, view)
    assert [other.trace_id for other in alike] == [A]
    said = explain(view, alike)
    assert said.prefix is not None and said.prefix.missed == "salt"
    (lonely,) = read_named(tmp_path, C)  # earlier ones are there, but none that begins like it
    assert read_alike(tmp_path, lonely) == []
    (first,) = read_named(tmp_path, A)
    assert read_alike(tmp_path, first) == []


def test_what_others_put_there_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, request(A), "{}", "null", "", '[{"trace_id": 1}]', '{"name": "theirs"}')
    assert len(read_since(tmp_path, 0)) == 1
    assert len(list(read_spans(tmp_path))) == len(request(A))


def test_what_began_earlier_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, request(A) + request(B, at_ms=1_000))
    assert [view.trace_id for view in read_since(tmp_path, 500 * MS)] == [B]


def test_the_slowest_are_told_as_if_all_had_been_read(tmp_path: Path) -> None:
    spans = [
        *request(A, hashes=HASHES),
        *request(B, at_ms=1_000, waits_ms=600, reason="grammar", hashes=HASHES),
        *request(C, at_ms=3_000, waits_ms=80, hashes=HASHES, salt="other"),
        *(one for one in request("d" * 32, at_ms=4_000) if one["kind"] == "INTERNAL"),
    ]
    write(tmp_path, spans)
    found = read_slowest(tmp_path, 2)
    assert [view.trace_id for view in found.views] == [B, C]
    assert ranking_json(rank_slowest(found)) == ranking_json(rank(join(spans), 2))
    assert rank_slowest(found).missed_prefixes == {"evicted": 1, "salt": 1}
    assert read_slowest(tmp_path, 9).views[-1].trace_id == A


def test_the_longest_common_beginning_comes_first_then_the_latest() -> None:
    views = join(
        [
            *request(A, at_ms=0, hashes=HASHES),
            *request(B, at_ms=1, hashes=["h16", "other"]),
            *request(C, at_ms=2, hashes=["h16", "another"]),
            *request("d" * 32, at_ms=3, hashes=HASHES),
            *request("e" * 32, at_ms=4, hashes=HASHES),
        ]
    )
    before = Alike(views).before(views[3])
    assert [view.trace_id for view in before] == [A, C, B]
    assert Alike(views).before(views[0]) == []


def test_few_are_looked_at_for_one() -> None:
    """Else many that begin alike would take the square of their number."""
    views = join([*(one for number in range(100) for one in request(f"{number:032}"))])
    for view in views:
        assert view.call is not None
        view.call.server["attributes"][names.PREFIX_HASHES] = list(HASHES)
        view.call.server["attributes"][names.REQUEST_ID] = view.trace_id
    latest = join(request(B, at_ms=1, hashes=HASHES))[0]
    assert len(Alike([*views, latest]).before(latest)) == 32


# ---------------------------------------------------------------- the command


def test_the_turns_of_a_trace_are_listed_by_their_request_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, turn("one") + turn("two", at_ms=500, waits_ms=100))
    traceparent = f"00-{A}-{'1' * 16}-01"
    for name in (A, traceparent):
        assert ttft([name, f"--trace-dir={tmp_path}"]) == 0
        said = capsys.readouterr().out
        assert "2 requests with a first token" in said
        assert said.index("\ntwo ") < said.index("\none ")
    assert ttft(["two", "--json", f"--trace-dir={tmp_path}"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["request_id"], said["trace_id"]) == ("two", A)


def test_an_empty_store_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--since", "1h"], [A]):
        assert ttft([*arguments, f"--trace-dir={tmp_path}"]) == 1
        assert str(tmp_path) in capsys.readouterr().err
    assert ttft([f"--trace-dir={tmp_path}/none"]) == 1
    assert "no trace store" in capsys.readouterr().err


def test_a_reader_that_had_enough_is_no_error(tmp_path: Path) -> None:
    """`firsttoken ttft | head -1`"""
    write(tmp_path, request(A))
    command = [sys.executable, "-m", "clients", "ttft", A, f"--trace-dir={tmp_path}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0
