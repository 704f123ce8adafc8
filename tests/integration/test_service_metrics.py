"""Each metric of the engine service is true: exact counts before and after known requests."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import Answer, Client, Engine, client, engine_process, request
from tests.ttft_load import MODEL

LATENCIES = {
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
}
FREED = "firsttoken_disconnect_to_freed_seconds"
COMPILE = "firsttoken_grammar_compile_seconds"
GRAMMAR_WAIT = "firsttoken_grammar_wait_seconds"
TYPES = {
    **dict.fromkeys(LATENCIES | {FREED, COMPILE, GRAMMAR_WAIT}, "histogram"),
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:forced_tokens": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:request_success": "counter",
    "vllm:admission_rejections": "counter",
    "firsttoken_engine_steps": "counter",
    "firsttoken_trace_spans_dropped": "counter",
}
LABELS = {
    "vllm:request_success": {"finished_reason": {"stop", "length", "abort", "error"}},
    "vllm:admission_rejections": {
        "reason": {
            "queue_full",
            "queue_wait",
            "rate_limit_exceeded",
            "engine_unavailable",
            "request_id_in_use",
        }
    },
}


@pytest.fixture(scope="module")
def engine(
    tiny_model_dir: MakeTinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """Two seats, two places in the queue, and 2,064 tokens of KV cache."""
    flags = ("--max-num-seqs=2", "--max-num-queued-reqs=2", "--num-gpu-blocks-override=129")
    work_dir = tmp_path_factory.mktemp("engine")
    name = "--served-model-name=tiny"
    with engine_process(tiny_model_dir("llama", **MODEL), work_dir, name, *flags) as running:
        yield running


@pytest.fixture
async def engine_client(engine: Engine) -> AsyncIterator[Client]:
    async with client(engine.grpc) as connected:
        yield connected


class Scrape:
    """Samples by name and, where there are, the labels beside the model's name."""

    def __init__(self, text: str) -> None:
        self.types: dict[str, str] = {}
        self.labels: dict[str, dict[str, set[str]]] = {}
        self.values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):
                continue
            self.types[family.name] = family.type
            for sample in family.samples:
                own = {k: v for k, v in sample.labels.items() if k not in ("model_name", "le")}
                assert sample.labels["model_name"] == "tiny"
                for name, value in own.items():
                    self.labels.setdefault(family.name, {}).setdefault(name, set()).add(value)
                if "le" not in sample.labels:
                    self.values[" ".join((sample.name, *own.values()))] = sample.value

    @staticmethod
    async def of(engine: Engine) -> Scrape:
        def read() -> str:
            with urllib.request.urlopen(f"http://{engine.metrics}/metrics", timeout=5) as answer:
                return str(answer.read().decode())

        return Scrape(await asyncio.to_thread(read))


class Change:
    """What changed inside `measured`."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    def count(self, histogram: str) -> float:
        return self.values[f"{histogram}_count"]

    def latencies(self) -> set[str]:
        """Those that got a sample."""
        return {name for name in LATENCIES if self.count(name)}


@asynccontextmanager
async def measured(engine: Engine, engine_client: Client) -> AsyncIterator[Change]:
    await engine_client.wait_idle(10)
    before, change = await Scrape.of(engine), Change()
    yield change
    await engine_client.wait_idle(10)
    after = await Scrape.of(engine)
    for name, value in after.values.items():
        change.values[name] = value - before.values.get(name, 0.0)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after.values[f"vllm:{gauge}"] == 0


async def begin(
    engine_client: Client, message: pb.GenerateRequest, *, num_deltas: int
) -> grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateEvent]:
    """A call that was accepted, and has received so many deltas."""
    call = engine_client.engine.Generate(message)
    await call.read()
    while num_deltas:
        event = await call.read()
        assert isinstance(event, pb.GenerateEvent)
        num_deltas -= event.HasField("delta")
    return call


def long(first_token: int) -> pb.GenerateRequest:
    """Runs until somebody ends it."""
    return request(prompt=[first_token, 5, 6, 7], max_tokens=1_000)


async def test_every_metric_has_its_type_and_bounded_labels(engine: Engine) -> None:
    scrape = await Scrape.of(engine)
    assert scrape.types == TYPES
    assert scrape.labels == LABELS


async def test_a_request_counts_once_in_each(engine: Engine, engine_client: Client) -> None:
    async with measured(engine, engine_client) as change:
        answer = await engine_client.generate(request(prompt=list(range(500, 540)), max_tokens=5))
    assert len(answer.tokens()) == 5
    assert change.latencies() == LATENCIES
    assert change.count("vllm:inter_token_latency_seconds") == 4
    for name in LATENCIES - {"vllm:inter_token_latency_seconds"}:
        assert change.count(name) == 1, name
    assert change["vllm:prompt_tokens_total"] == 40
    assert change["vllm:generation_tokens_total"] == 5
    assert change["vllm:request_prompt_tokens_sum"] == 40
    assert change["vllm:request_generation_tokens_sum"] == 5
    assert change["vllm:prefix_cache_queries_total"] == 40
    assert change["vllm:prefix_cache_hits_total"] == 0
    # one step for the prompt, which makes the first token; each later token is computed from one
    assert change["firsttoken_engine_steps_total"] == 5
    assert change.count("vllm:iteration_tokens_total") == 5
    assert change["vllm:iteration_tokens_total_sum"] == 40 + 4
    assert change["vllm:request_success_total length"] == 1
    timing = answer.finished().timing
    ttft = change["vllm:time_to_first_token_seconds_sum"]
    assert ttft == pytest.approx(timing.first_token_us * 1e-6, abs=2e-6)  # from arrival
    stages = ("queue", "prefill", "decode")
    parts = sum(change[f"vllm:request_{stage}_time_seconds_sum"] for stage in stages)
    assert parts == pytest.approx(change["vllm:e2e_request_latency_seconds_sum"])
    assert change.count(FREED) == 0
    untouched = ("stop", "abort", "error")
    assert sum(change[f"vllm:request_success_total {reason}"] for reason in untouched) == 0


async def test_a_cached_prefix_is_a_hit_and_not_computed(
    engine: Engine, engine_client: Client
) -> None:
    message = request(prompt=list(range(600, 640)), max_tokens=2)
    await engine_client.generate(message)
    async with measured(engine, engine_client) as change:
        answer = await engine_client.generate(message)
    cached = answer.finished().usage.cached_tokens
    assert cached >= 32  # its full blocks
    assert change["vllm:prefix_cache_queries_total"] == 40
    assert change["vllm:prefix_cache_hits_total"] == cached
    assert change["vllm:prompt_tokens_total"] == 40 - cached
    assert change["vllm:iteration_tokens_total_sum"] == 40 - cached + 1
    assert change["vllm:request_prompt_tokens_sum"] == 40


async def test_one_aborted_while_it_runs_had_a_first_token(
    engine: Engine, engine_client: Client
) -> None:
    async with measured(engine, engine_client) as change:
        call = await begin(engine_client, long(700), num_deltas=3)
        call.cancel()
    assert change.count("vllm:time_to_first_token_seconds") == 1
    assert change.count("vllm:inter_token_latency_seconds") >= 2
    generated = change["vllm:request_generation_tokens_sum"]
    assert change.count("vllm:inter_token_latency_seconds") == generated - 1
    assert change["vllm:request_success_total abort"] == 1
    assert change.count(FREED) == 1
    assert 0 <= change[f"{FREED}_sum"] < 5


async def test_one_aborted_in_the_queue_had_none(engine: Engine, engine_client: Client) -> None:
    async with measured(engine, engine_client) as change:
        running = [await begin(engine_client, long(710 + i), num_deltas=1) for i in range(2)]
        waiting = await begin(engine_client, long(720), num_deltas=0)
        waits = await engine_client.wait_load(lambda load: load.num_waiting == 1, 5)
        assert waits.num_running == 2
        seen = await Scrape.of(engine)
        assert seen.values["vllm:num_requests_running"] == 2
        assert seen.values["vllm:num_requests_waiting"] == 1
        assert 0 < seen.values["vllm:kv_cache_usage_perc"] <= 1
        waiting.cancel()
        await engine_client.wait_load(lambda load: load.num_waiting == 0, 5)
        for call in running:
            call.cancel()
    assert change["vllm:request_success_total abort"] == 3
    assert change.count("vllm:time_to_first_token_seconds") == 2
    assert change.count("vllm:request_prefill_time_seconds") == 2
    assert change.count("vllm:request_decode_time_seconds") == 2
    assert change.count("vllm:request_queue_time_seconds") == 3  # it did wait
    assert change.count("vllm:e2e_request_latency_seconds") == 3
    assert change["vllm:prompt_tokens_total"] == 8
    assert change["vllm:prefix_cache_queries_total"] == 8
    assert change.count(FREED) == 3


async def test_the_refused_are_counted_and_nothing_else_of_them(
    engine: Engine, engine_client: Client
) -> None:
    async with measured(engine, engine_client) as change:
        one = long(730)
        one.request_id = "taken"
        calls = [await begin(engine_client, one, num_deltas=1)]
        calls.append(await begin(engine_client, long(731), num_deltas=1))
        assert (await engine_client.generate(one)).reason == "REQUEST_ID_IN_USE"
        for i in range(2):
            calls.append(await begin(engine_client, long(732 + i), num_deltas=0))
        for _ in range(3):
            assert (await engine_client.generate(long(740))).reason == "QUEUE_FULL"
        for call in calls:
            call.cancel()
    assert change["vllm:admission_rejections_total queue_full"] == 3
    assert change["vllm:admission_rejections_total request_id_in_use"] == 1
    ended = {name: n for name, n in change.values.items() if "request_success" in name and n}
    assert ended == {"vllm:request_success_total abort": 4}
    assert change.count("vllm:e2e_request_latency_seconds") == 4


async def test_preemptions_are_counted_and_make_no_second_first_token(
    engine: Engine, engine_client: Client
) -> None:
    """Two answers of 1,064 tokens each, for which there are 2,064."""
    async with measured(engine, engine_client) as change:
        answers = await asyncio.gather(
            *(
                engine_client.generate(request(prompt=[750 + i] * 64, max_tokens=1_000))
                for i in range(2)
            )
        )
    preempted = sum(answer.finished().timing.preemptions for answer in answers)
    assert change["vllm:num_preemptions_total"] == preempted >= 1
    assert change.count("vllm:time_to_first_token_seconds") == 2
    assert change.count("vllm:inter_token_latency_seconds") == 2 * 999
    assert change["vllm:generation_tokens_total"] == 2_000
    assert change["vllm:prompt_tokens_total"] == 128  # what was computed again is not a prompt's
    assert change["vllm:iteration_tokens_total_sum"] > 128 + 2 * 999  # but steps had to
    assert change["vllm:request_success_total length"] == 2
    assert change.count(FREED) == 0


async def test_a_grammar_is_compiled_once(engine: Engine, engine_client: Client) -> None:
    async def ask(source: str) -> Answer:
        message = request(prompt=[760, 5, 6], max_tokens=4)
        message.structured_output.regex = source
        return await engine_client.generate(message, timeout=60)

    async with measured(engine, engine_client) as change:
        for _ in range(2):
            assert (await ask("[ab]{9}")).code is grpc.StatusCode.OK
    assert change.count(COMPILE) == 1
    assert change[f"{COMPILE}_sum"] > 0
    async with measured(engine, engine_client) as change:
        assert (await ask("[cd]{9}")).code is grpc.StatusCode.OK
        assert (await ask("[ab]{9}")).code is grpc.StatusCode.OK
    assert change.count(COMPILE) == 1


async def test_the_wait_for_a_grammar_is_told_as_callers_are_told_of_it(
    engine: Engine, engine_client: Client
) -> None:
    """And as a trace would: what it lists as waits covers it."""
    message = request(prompt=[765, 5, 6], max_tokens=4)
    message.structured_output.regex = "[ef]{9}"
    message.response.timing = True
    for outcome in ("compiled", "cached"):
        async with measured(engine, engine_client) as change:
            answer = await engine_client.generate(message, timeout=60)
        assert answer.code is grpc.StatusCode.OK
        timing = answer.finished().timing
        assert change[f"{GRAMMAR_WAIT}_count regex {outcome}"] == 1
        waited = change[f"{GRAMMAR_WAIT}_sum regex {outcome}"]
        assert waited == pytest.approx(timing.grammar_wait_us * 1e-6, abs=2e-6)
        reasons = (pb.WAIT_REASON_NOT_SEEN, pb.WAIT_REASON_GRAMMAR)
        told = sum(wait.duration_us for wait in timing.waits if wait.reason in reasons)
        assert 0 < waited <= told * 1e-6 + 2e-6
        parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
        sum_of_parts = waited + sum(change[f"vllm:{part}_seconds_sum"] for part in parts)
        assert sum_of_parts == pytest.approx(change["vllm:e2e_request_latency_seconds_sum"])


async def test_whoever_leaves_before_the_grammar_is_there_has_waited(
    engine: Engine, engine_client: Client
) -> None:
    message = request(prompt=[766, 5, 6], max_tokens=4)
    message.structured_output.regex = "(a|b)(c|d)" * 500
    async with measured(engine, engine_client) as change:
        call = await begin(engine_client, message, num_deltas=0)
        call.cancel()
    outcomes = {
        name.split()[-1]: value
        for name, value in change.values.items()
        if name.startswith(f"{GRAMMAR_WAIT}_count") and value
    }
    assert outcomes in ({"in_vain": 1}, {"compiled": 1})  # it may be fast
    assert change.count("vllm:request_queue_time_seconds") == 1


async def test_a_deadline_that_passes_is_an_error_and_frees(
    engine: Engine, engine_client: Client
) -> None:
    async with measured(engine, engine_client) as change:
        running = [await begin(engine_client, long(770 + i), num_deltas=1) for i in range(2)]
        late = await engine_client.generate(long(780), timeout=0.2)
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        for call in running:
            call.cancel()
    assert change["vllm:request_success_total error"] == 1
    assert change["vllm:request_success_total abort"] == 2
    assert change.count("vllm:time_to_first_token_seconds") == 2
