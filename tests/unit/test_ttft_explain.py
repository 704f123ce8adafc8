"""The explainer on spans made by hand: what a part is, which cause is named, what is ranked."""

from __future__ import annotations

import itertools

import pytest

from tests.trace_samples import MS, A, B, C, chunk, event, request, span
from traces import names
from traces.explain.causes import KINDS, causes_of, kind_of
from traces.explain.explanation import Explanation, as_json, explain
from traces.explain.parts import WAIT_PREFIX
from traces.explain.ranking import percentiles, rank, ranking_text
from traces.explain.waterfall import rows_of, waterfall
from traces.request_view import join
from traces.stored_spans import AttributeValue, StoredSpan


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


def test_nothing_of_a_trace_is_nothing() -> None:
    assert join([span(A, "render", 0, 1)]) == []


def test_the_turns_of_one_trace_are_requests_of_their_own() -> None:
    """An agent's: two at once, and one later."""
    turns = [
        request(A, at_ms=0, waits_ms=60),
        request(A, at_ms=5, waits_ms=600, reason="grammar"),
        request(A, at_ms=1_000, waits_ms=80, reason="no_slot"),
    ]
    agent = span(A, "agent", -10, 3_000)
    for turn in turns:
        turn[0]["parent_span_id"] = agent["span_id"]
    views = join([agent, *itertools.chain(*turns)])
    explained_turns = [explain(view, views) for view in views]
    tops = [one.top.kind.name for one in explained_turns if one.top]
    assert tops == ["no_blocks", "grammar", "no_slot"]
    times = [one.ttft_seconds for one in explained_turns]
    assert times == pytest.approx([0.100, 0.640, 0.120])
    for one, turn in zip(explained_turns, turns, strict=True):
        assert one.attributed_share == pytest.approx(1.0)
        of_turn = {s["span_id"] for s in turn if s["name"] != names.SPAN_STEP}
        assert {s["span_id"] for s in one.view.spans} == of_turn


def test_direct_calls_of_one_trace_are_requests_of_their_own() -> None:
    spans = []
    for number, at_ms in enumerate((0, 1_000)):
        caller, server, *stages = _direct_call(at_ms, request_id=f"client-{number}")
        spans += [caller, server, *stages]
    refused, elsewhere, *_ = _direct_call(990, request_id="client-1")
    refused["events"] = []
    spans[5]["attributes"][names.REQUEST_ID] = "client-1-r2"
    views = join([*spans, refused, elsewhere])
    assert [view.call and view.call.client for view in views] == [spans[0], spans[5]]
    assert [len(view.spans) for view in views] == [5, 7]
    said = explain(views[1])
    assert seconds(said)["retries"] == pytest.approx(0.010)
    assert said.ttft_seconds == pytest.approx(0.096)  # of the first attempt, too


def _direct_call(at_ms: float, *, request_id: str) -> list[StoredSpan]:
    """CLIENT, SERVER, admit, prefill, deliver."""
    whole = request(A, at_ms=at_ms)
    caller = next(one for one in whole if one["kind"] == "CLIENT")
    caller["parent_span_id"] = ""
    caller["attributes"][names.REQUEST_ID] = request_id
    server = next(one for one in whole if one["name"] == caller["name"] and one is not caller)
    server["attributes"][names.REQUEST_ID] = request_id
    wanted = (names.SPAN_ADMIT, names.SPAN_PREFILL, names.SPAN_DELIVER)
    return [caller, server, *(one for one in whole if one["name"] in wanted)]


def test_another_prompt_of_the_same_request_is_no_earlier_attempt() -> None:
    spans = request(A)
    client = next(one for one in spans if one["kind"] == "CLIENT")
    client["attributes"][names.REQUEST_ID] = "cmpl-1-1"
    sibling = span(
        A,
        client["name"],
        8,
        200,
        kind="CLIENT",
        parent=spans[0]["span_id"],
        attributes={names.RPC_METHOD: "Generate", names.REQUEST_ID: "cmpl-1-0"},
    )
    assert "retries" not in seconds(explained([*spans, sibling]))
    earlier = {**sibling, "attributes": {**client["attributes"], names.REQUEST_ID: "cmpl-1-1"}}
    client["attributes"][names.REQUEST_ID] = "cmpl-1-1-r2"
    said = explained([*spans, StoredSpan(**earlier)])  # type: ignore[typeddict-item]
    assert seconds(said)["retries"] == pytest.approx(0.002)


def test_what_outlives_its_request_is_cut_off() -> None:
    """The caller left while a step ran: it ends later, and so does the span of its prefill."""
    spans = [s for s in request(A) if s["name"] not in (names.SPAN_FIRST_WRITE, names.SPAN_DELIVER)]
    facade = spans[0]
    facade["events"], facade["end_unix_ns"] = facade["events"][:1], 80 * MS
    client = next(one for one in spans if one["kind"] == "CLIENT")
    client["events"], client["end_unix_ns"] = [], 80 * MS
    prefill = next(one for one in spans if one["name"] == names.SPAN_PREFILL)
    prefill["events"] = prefill["events"][:1]
    said = explained(spans)
    assert said.ttft_seconds is None
    assert said.total_seconds == pytest.approx(0.080)
    assert max(part.end_ns for part in said.parts) == 80 * MS
    assert sum(part.seconds for part in said.parts) == pytest.approx(0.080)
    assert seconds(said)["prefill"] == pytest.approx(0.0035)


def test_a_refusal_is_time_of_the_engine() -> None:
    spans = [one for one in request(A) if one["kind"] in ("SERVER", "CLIENT")]
    facade, client, server = spans
    facade["events"], facade["end_unix_ns"] = facade["events"][:1], 26 * MS
    client["events"], client["end_unix_ns"] = [], 25 * MS
    server["end_unix_ns"] = 24 * MS
    server["attributes"][names.ERROR_TYPE] = "QUEUE_FULL"
    said = explained(spans)
    assert seconds(said) == pytest.approx({"network": 0.003, "admit": 0.012})
    assert said.unattributed_seconds == pytest.approx(0.011)  # no stage of the facade is there
    assert said.top is not None and said.top.kind.name == "engine_bookkeeping"


@pytest.mark.parametrize(
    ("ending", "is_advised"), [("client_gone", True), ("queue_full", False), ("", False)]
)
def test_what_failed_is_not_told_to_be_faster(ending: str, is_advised: bool) -> None:
    spans = request(A)
    spans[0]["events"] = spans[0]["events"][:1]
    spans[0]["attributes"][names.ERROR_TYPE] = ending
    said = explained(spans)
    assert said.ttft_seconds is None and bool(said.advice()) is is_advised
    assert f"no first token, {ending or 'ended'} after" in waterfall(said)


@pytest.mark.parametrize("had_first_token", [False, True])
def test_what_died_with_the_core_is_told_as_such(had_first_token: bool) -> None:
    told = (names.SPAN_QUEUE, names.SPAN_PREFILL)
    spans = [one for one in request(A) if one["name"] not in told]
    server = next(s for s in spans if s["kind"] == "SERVER" and "/v1/" not in s["name"])
    server["attributes"][names.ERROR_TYPE] = "ENGINE_UNAVAILABLE"
    if not had_first_token:
        late = (names.SPAN_DELIVER, names.SPAN_FIRST_WRITE)
        spans = [one for one in spans if one["name"] not in late]
        facade, client = spans[0], next(s for s in spans if s["kind"] == "CLIENT")
        facade["events"], client["events"] = facade["events"][:1], []
        facade["end_unix_ns"] = client["end_unix_ns"] = server["end_unix_ns"] = 93 * MS
    said = explained(spans)
    assert (said.ttft_seconds is not None) is had_first_token
    assert seconds(said)["lost"] == pytest.approx(0.080)
    assert said.attributed_share == pytest.approx(1.0)
    assert said.top is not None and said.top.kind.name == "core_died"


def test_an_engine_whose_spans_are_elsewhere_is_told_as_such() -> None:
    facade, *others = request(A)
    here = [facade, *(s for s in others if s["parent_span_id"] == facade["span_id"])]
    slower = span(
        A,
        "firsttoken.v1.Engine/Generate",
        9,
        200,
        kind="CLIENT",
        parent=facade["span_id"],
        attributes={names.RPC_METHOD: "Generate", names.REQUEST_ID: "another prompt's"},
        events=[event(names.EVENT_FIRST_TOKEN_RECEIVED, 190)],
    )
    said = explained([*here, slower])
    assert said.ttft_seconds == pytest.approx(0.100)
    assert seconds(said)["engine"] == pytest.approx(0.086)
    assert said.attributed_share == pytest.approx(1.0)
    assert said.top is not None and said.top.kind.name == "engine_unseen"


def test_a_body_that_comes_slowly_is_no_work_of_the_facade() -> None:
    spans = request(A, waits_ms=1)
    for one in spans:
        one["start_unix_ns"] += 500 * MS if one["name"] != names.SPAN_READ_BODY else 0
        one["end_unix_ns"] += 500 * MS
        for at in one["events"]:
            at["unix_ns"] += 500 * MS
    spans[0]["start_unix_ns"] = 0
    said = explained(spans)
    assert said.top is not None and said.top.kind.name == "upload"
    assert said.attributed_share == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("cached_tokens", "advice"), [(96, "a faster machine"), (64, "a shorter prompt")]
)
def test_who_has_all_in_the_cache_is_not_told_to_cache(cached_tokens: int, advice: str) -> None:
    spans = request(A, waits_ms=0, cached_tokens=cached_tokens)
    prefill = next(one for one in spans if one["name"] == names.SPAN_PREFILL)
    prefill["events"][0]["attributes"][names.CHUNK_STEP_TOKENS] = 64
    said = explained(spans)
    assert said.top is not None and said.top.kind.name == "prefill"
    assert said.advice().startswith(advice)


def test_a_neighbour_of_the_same_trace_is_told_as_such() -> None:
    spans = request(A, reason="no_budget")
    step = next(one for one in spans if one["name"] == names.SPAN_STEP)
    assert f"(trace {'n' * 32})" in explained(spans).sentence()
    step["attributes"][names.STEP_SHARE_TRACES] = [A, A]
    assert "request neighbour of the same trace" in explained(spans).sentence()
