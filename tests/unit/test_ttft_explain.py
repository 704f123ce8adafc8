"""The explainer on spans made by hand: what a part is, which cause is named, what is ranked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from traces import names
from traces.explain.causes import KINDS, causes_of, kind_of
from traces.explain.explanation import Explanation, as_json, explain
from traces.explain.parts import WAIT_PREFIX
from traces.explain.ranking import percentiles, rank, ranking_text
from traces.explain.waterfall import rows_of, waterfall
from traces.request_view import join, read_alike, read_request
from traces.stored_spans import AttributeValue, StoredEvent, StoredLink, StoredSpan

MS = 1_000_000
_ids = itertools.count(1)


def span(
    trace_id: str,
    name: str,
    start_ms: float,
    end_ms: float,
    *,
    parent: str = "",
    kind: str = "INTERNAL",
    attributes: dict[str, AttributeValue] | None = None,
    events: list[StoredEvent] | None = None,
    links: list[StoredLink] | None = None,
) -> StoredSpan:
    return StoredSpan(
        trace_id=trace_id,
        span_id=f"{next(_ids):016x}",
        parent_span_id=parent,
        name=name,
        kind=kind,
        start_unix_ns=round(start_ms * MS),
        end_unix_ns=round(end_ms * MS),
        attributes=attributes or {},
        events=events or [],
        links=links or [],
        status={"code": "UNSET", "message": ""},
        service="",
        pid=1,
    )


def event(name: str, at_ms: float, **attributes: AttributeValue) -> StoredEvent:
    return StoredEvent(name=name, unix_ns=round(at_ms * MS), attributes=attributes)


def wait(reason: str, start_ms: float, end_ms: float) -> StoredEvent:
    duration_us = round((end_ms - start_ms) * 1000)
    return StoredEvent(
        name=names.EVENT_WAIT,
        unix_ns=round(start_ms * MS),
        attributes={names.WAIT_REASON: reason, names.WAIT_DURATION_US: duration_us},
    )


def chunk(step_id: int, start_ms: float, end_ms: float, tokens: int, of: int) -> StoredEvent:
    return StoredEvent(
        name=names.EVENT_PREFILL_CHUNK,
        unix_ns=round(end_ms * MS),
        attributes={
            names.STEP_ID: step_id,
            names.CHUNK_TOKENS: tokens,
            names.CHUNK_STEP_TOKENS: of,
            names.CHUNK_SCHEDULE_US: 0,
            names.CHUNK_DURATION_US: round((end_ms - start_ms) * 1000),
        },
    )


def request(
    trace_id: str,
    *,
    at_ms: float = 0.0,
    reason: str = "no_blocks",
    waits_ms: float = 60.0,
    engine_clock_ms: float = 0.0,
    hashes: list[str] | None = None,
    salt: str = "s",
    cached_tokens: int = 0,
) -> list[StoredSpan]:
    """Arrives, 10 ms in the facade, 2 out, 1 admitted, waits, 20 in its only step, 3 back, 4 to
    write; half of the step is another's."""
    start = at_ms
    facade = span(
        trace_id,
        "POST /v1/completions",
        start,
        start + 200 + waits_ms,
        kind="SERVER",
        attributes={names.GEN_AI_OPERATION_NAME: "text_completion"},
    )
    inside = facade["span_id"]
    read = span(trace_id, names.SPAN_READ_BODY, start, start + 4, parent=inside)
    tokenize = span(trace_id, names.SPAN_TOKENIZE, start + 4, start + 10, parent=inside)
    sent = start + 10
    received = sent + 2 + 1 + waits_ms + 20 + 3
    client = span(
        trace_id,
        "firsttoken.v1.Engine/Generate",
        sent,
        received + 100,
        kind="CLIENT",
        attributes={names.RPC_METHOD: "Generate"},
        events=[event(names.EVENT_FIRST_TOKEN_RECEIVED, received)],
        parent=inside,
    )
    write = span(trace_id, names.SPAN_FIRST_WRITE, received, received + 4, parent=inside)
    facade["events"] = [
        event(names.EVENT_PREPARED, sent),
        event(names.EVENT_FIRST_BYTE_WRITTEN, received + 4),
    ]
    came = sent + 2 + engine_clock_ms
    server = span(
        trace_id,
        "firsttoken.v1.Engine/Generate",
        came,
        came + 200,
        kind="SERVER",
        parent=client["span_id"],
        attributes={
            names.RPC_METHOD: "Generate",
            names.REQUEST_ID: f"request of {trace_id}",
            names.PROMPT_TOKENS: 100,
            names.PREFIX_HASHES: hashes or [],
            names.PREFIX_SALT: salt,
        },
    )
    below = server["span_id"]
    queued, scheduled = came + 1, came + 1 + waits_ms
    step = span(
        f"step-{trace_id}",
        names.SPAN_STEP,
        scheduled,
        scheduled + 20,
        attributes={
            names.STEP_ID: 7,
            names.STEP_TOKENS: 128,
            names.STEP_SHARE_REQUESTS: [f"request of {trace_id}", "neighbour"],
            names.STEP_SHARE_TRACES: [trace_id, "n" * 32],
            names.STEP_SHARE_TOKENS: [64, 64],
            names.STEP_SHARE_PREFILL: [True, True],
        },
    )
    link = StoredLink(trace_id=step["trace_id"], span_id=step["span_id"])
    return [
        facade,
        read,
        tokenize,
        client,
        write,
        server,
        step,
        span(trace_id, names.SPAN_ADMIT, came, queued, parent=below),
        span(
            trace_id,
            names.SPAN_QUEUE,
            queued,
            scheduled,
            events=[wait(reason, queued, scheduled)],
            parent=below,
        ),
        span(
            trace_id,
            names.SPAN_PREFILL,
            scheduled,
            scheduled + 20,
            attributes={names.CACHED_TOKENS: cached_tokens},
            events=[
                chunk(7, scheduled, scheduled + 20, 64, of=128),
                event(names.EVENT_FIRST_TOKEN, scheduled + 20),
            ],
            links=[link],
            parent=below,
        ),
        span(trace_id, names.SPAN_DELIVER, scheduled + 20, scheduled + 20, parent=below),
    ]


A, B, C = (digit * 32 for digit in "abc")


def explained(spans: list[StoredSpan], trace_id: str = A) -> Explanation:
    views = join(spans)
    (view,) = (view for view in views if view.trace_id == trace_id)
    return explain(view, views)


def seconds(explanation: Explanation) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in explanation.parts:
        found[part.name] = round(found.get(part.name, 0.0) + part.seconds, 6)
    return found


def test_parts_lie_between_their_own_stamps() -> None:
    said = explained(request(A))
    assert said.ttft_seconds == pytest.approx(0.100)
    assert seconds(said) == {
        "read_body": 0.004,
        "tokenize": 0.006,
        "network": 0.005,
        "admit": 0.001,
        "wait_no_blocks": 0.060,
        "prefill": 0.010,
        "prefill_others": 0.010,
        "first_write": 0.004,
    }
    assert said.attributed_share == pytest.approx(1.0)


@pytest.mark.parametrize("engine_clock_ms", [-5_000.0, 5_000.0, 3.0])
def test_clocks_that_differ_move_no_time(engine_clock_ms: float) -> None:
    said = explained(request(A, engine_clock_ms=engine_clock_ms))
    assert seconds(said)["network"] == pytest.approx(0.005)
    assert said.attributed_share == pytest.approx(1.0)
    starts = [part.start_ns for part in said.parts]
    assert starts == sorted(starts) and starts[0] == 0


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("no_blocks", "no_blocks"),
        ("no_slot", "no_slot"),
        ("no_budget", "work_of_others"),
        ("running_step", "work_of_others"),
        ("grammar", "grammar"),
        ("turn", "fair_share"),
        ("prefix_in_flight", "prefix_in_flight"),
        ("something newer", "engine_bookkeeping"),
    ],
)
def test_the_largest_cause_is_named_with_its_knob(reason: str, cause: str) -> None:
    said = explained(request(A, reason=reason))
    assert said.top is not None and said.top.kind.name == cause
    assert said.top.kind.says in said.sentence()
    assert said.advice() == said.top.kind.knob != ""


def test_of_two_engines_the_one_that_answered_counts() -> None:
    spans = request(A)
    refused = span(
        A,
        "firsttoken.v1.Engine/Generate",
        7,
        9,
        kind="CLIENT",
        parent=spans[0]["span_id"],
        attributes={names.RPC_METHOD: "Generate"},
    )
    elsewhere = span(
        A,
        "firsttoken.v1.Engine/Generate",
        8,
        8.5,
        kind="SERVER",
        parent=refused["span_id"],
        attributes={names.RPC_METHOD: "Generate", names.REQUEST_ID: "refused"},
    )
    said = explained([*spans, refused, elsewhere])
    assert said.view.call is not None
    assert said.view.call.request_id == f"request of {A}"
    assert seconds(said)["retries"] == pytest.approx(0.003)
    assert said.attributed_share == pytest.approx(1.0)


def test_what_is_missing_is_unattributed() -> None:
    spans = [one for one in request(A) if one["name"] != names.SPAN_QUEUE]
    said = explained(spans)
    assert said.unattributed_seconds == pytest.approx(0.060)
    assert said.attributed_share == pytest.approx(0.4)


def test_neighbours_have_their_share_of_the_steps() -> None:
    (neighbour,) = explained(request(A)).neighbours
    assert (neighbour.request_id, neighbour.trace_id) == ("neighbour", "n" * 32)
    assert neighbour.seconds == pytest.approx(0.010)
    assert (neighbour.prefill_tokens, neighbour.decode_tokens) == (64, 0)


def test_json_has_what_programs_need() -> None:
    said = as_json(explained(request(A)))
    assert said["cause"] == "no_blocks"
    parts = said["parts"]
    assert isinstance(parts, list)
    assert {"name", "cause", "start_seconds", "end_seconds", "seconds", "share", "detail"} == set(
        parts[0]
    )
    assert sum(part["seconds"] for part in parts) == pytest.approx(0.1)


HASHES = ["h16", "h32", "h64"]


@pytest.mark.parametrize(
    ("later", "missed"),
    [
        ({"salt": "other"}, ("salt", 64)),
        ({}, ("evicted", 64)),
        ({"hashes": ["h16", "x", "y"]}, ("evicted", 16)),
        ({"cached_tokens": 64}, ("", 0)),
        ({"hashes": ["x", "y", "z"]}, ("", 0)),
    ],
)
def test_why_a_prefix_was_not_reused(later: dict[str, object], missed: tuple[str, int]) -> None:
    second: dict[str, object] = {"hashes": HASHES, **later}
    spans = request(A, hashes=HASHES) + request(B, at_ms=1_000, **second)  # type: ignore[arg-type]
    prefix = explained(spans, B).prefix
    assert prefix is not None
    assert (prefix.missed, prefix.missed_tokens) == missed
    assert prefix.earlier_trace_id == (A if missed[0] else "")
    first = explained(spans, A).prefix
    assert first is not None and first.missed == ""  # what comes later is no excuse


def test_a_template_that_changed_is_told() -> None:
    message: dict[str, AttributeValue] = {
        names.FIRST_MESSAGE: "m",
        names.FIRST_MESSAGE_CHARS: 2_000,
    }
    spans = []
    for trace_id, at_ms, hashes in ((A, 0.0, HASHES), (B, 1_000.0, ["other"])):
        one = request(trace_id, at_ms=at_ms, hashes=hashes)
        parent = one[0]["span_id"]
        render = span(trace_id, names.SPAN_RENDER, at_ms, at_ms, parent=parent, attributes=message)
        spans += [*one, render]
    said = explained(spans, B)
    assert said.prefix is not None and said.prefix.missed == "template"
    assert A in said.prefix_text()


def test_many_are_ranked() -> None:
    spans = request(A, waits_ms=60) + request(B, waits_ms=600, reason="grammar")
    spans += request(C, waits_ms=80)
    ranking = rank(join(spans))
    assert [one.view.trace_id for one in ranking.explanations] == [B, C, A]
    assert [cause.kind.name for cause in ranking.causes][:2] == ["grammar", "no_blocks"]
    assert {c.kind.name: c.num_top for c in ranking.causes if c.num_top} == {
        "grammar": 1,
        "no_blocks": 2,
    }
    assert ranking.ttft_percentiles[50] == pytest.approx(0.120)
    assert [one.view.trace_id for one in rank(join(spans), slowest=1).explanations] == [B]
    text = ranking_text(ranking)
    assert "3 requests with a first token" in text and B in text


@pytest.mark.parametrize(
    ("count", "expected"), [(0, {}), (1, {50: 1, 90: 1, 99: 1}), (100, {50: 50, 90: 90, 99: 99})]
)
def test_percentiles(count: int, expected: dict[int, float]) -> None:
    assert percentiles([float(n) for n in range(1, count + 1)]) == expected


def test_a_waterfall_fits_a_terminal() -> None:
    text = waterfall(explained(request(A)))
    for line in text.splitlines():
        if "|" in line:
            assert len(line.split("|")[1]) == 40 and "█" in line
    assert "first token after 0.100 s, 100.0% of them attributed" in text


def test_many_parts_of_a_name_are_one_row() -> None:
    spans = request(A)
    (prefill,) = (one for one in spans if one["name"] == names.SPAN_PREFILL)
    start = prefill["start_unix_ns"] / MS
    prefill["events"] = [chunk(n, start + n, start + n + 1, 1, of=1) for n in range(20)]
    rows = [row for row in rows_of(explained(spans).parts) if row.name == "prefill"]
    (row,) = rows
    assert row.seconds == pytest.approx(0.020) and row.detail == "20 times"


def test_a_direct_call_is_explained_from_the_engines_spans() -> None:
    spans = [one for one in request(A) if one["kind"] != "CLIENT"]
    kept = [one for one in spans if not (one["kind"] == "SERVER" and "/v1/" in one["name"])]
    server = next(one for one in kept if one["kind"] == "SERVER")
    said = explained(
        [
            one
            for one in kept
            if one["name"] in (names.SPAN_STEP,)
            or one is server
            or one["parent_span_id"] == server["span_id"]
        ]
    )
    assert said.ttft_seconds == pytest.approx(0.081)
    assert said.attributed_share == pytest.approx(1.0)


def test_every_kind_has_words_and_every_wait_a_kind() -> None:
    for kind in KINDS:
        assert kind.says and kind.knob
    reasons = ("not_seen", "grammar", "prefix_in_flight", "no_slot", "no_budget", "no_blocks")
    for reason in (*reasons, "turn", "running_step", "to_core"):
        assert kind_of(WAIT_PREFIX + reason) in KINDS
    assert causes_of([]) == []


def test_of_a_store_only_what_begins_alike_is_read(tmp_path: Path) -> None:
    spans = request(A, hashes=HASHES) + request(B, at_ms=1_000, hashes=HASHES, salt="other")
    spans += request(C, at_ms=500, hashes=["else"])
    lines = [json.dumps(one) for one in spans]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"trace_id": "torn']))
    view = read_request(tmp_path, B)
    assert view is not None
    alike = read_alike(tmp_path, view)
    assert [other.trace_id for other in alike] == [A]
    said = explain(view, alike)
    assert said.prefix is not None and said.prefix.missed == "salt"
    first = read_request(tmp_path, A)
    assert first is not None and read_alike(tmp_path, first) == []


def test_nothing_of_a_trace_is_nothing(tmp_path: Path) -> None:
    assert read_request(tmp_path, A) is None
    assert join([span(A, "render", 0, 1)]) == []
