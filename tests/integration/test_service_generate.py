"""The engine service over real processes and sockets: what a stream is, what is refused."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tokenizers import Tokenizer

from protos import engine_pb2 as pb
from tests.conftest import MakeTinyModel
from tests.running_engine import Client, Engine, client, engine_process, request


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir: MakeTinyModel) -> Path:
    return tiny_model_dir("llama")


@pytest.fixture(scope="module")
def engine(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    flags = (
        "--served-model-name=tiny",
        "--max-model-len=512",
        "--num-gpu-blocks-override=256",
        "--max-num-batched-tokens=64",
        "--max-output-tokens=300",
        "--max-samples=8",
    )
    with engine_process(model_dir, tmp_path_factory.mktemp("engine"), *flags) as running:
        yield running


@pytest.fixture
async def engine_client(engine: Engine) -> AsyncIterator[Client]:
    async with client(engine.grpc) as connected:
        yield connected
        await connected.wait_idle(5)  # no test may leave anything behind


# ---------------------------------------------------------------- streams


async def test_a_stream_from_accepted_to_finished(engine_client: Client) -> None:
    prompt = list(range(1_000, 1_150))  # three chunks of at most 64
    answer = await engine_client.generate(request(request_id="one", prompt=prompt, max_tokens=5))
    assert answer.code is grpc.StatusCode.OK
    assert [event.seq for event in answer.events] == list(range(len(answer.events)))
    assert answer.events[0].accepted == pb.Accepted(
        request_id="one", prompt_tokens=150, max_tokens=5
    )
    progress = [e.prefill_progress for e in answer.events if e.HasField("prefill_progress")]
    computed = [p.computed_tokens for p in progress]  # the latest replaces one not yet sent
    assert computed == sorted(set(computed))
    assert computed[-1] == 150
    assert set(computed) <= {64, 128, 150}
    assert answer.kinds()[-1] == "finished"
    assert answer.kinds().count("finished") == 1
    assert len(answer.tokens()) == 5
    finished = answer.finished()
    assert finished.reason == pb.FINISH_REASON_LENGTH
    assert finished.usage == pb.Usage(prompt_tokens=150, cached_tokens=0, completion_tokens=5)
    timing = finished.timing
    assert timing.prefill_chunks == 3
    assert timing.first_step_id > 0
    parts = timing.queue_us + timing.grammar_wait_us + timing.prefill_us
    assert abs(parts - timing.first_token_us) <= 3


async def test_a_second_run_hits_the_cache_and_says_the_same(engine_client: Client) -> None:
    message = request(prompt=list(range(2_000, 2_049)), max_tokens=6)
    cold = await engine_client.generate(message)
    hit = await engine_client.generate(message)
    assert hit.tokens() == cold.tokens()
    assert cold.finished().usage.cached_tokens == 0
    assert hit.finished().usage.cached_tokens == 48
    assert hit.events[1].prefill_progress.cached_tokens == 48


async def test_samples_end_one_by_one_with_their_own_tokens(engine_client: Client) -> None:
    message = request(n=4, max_tokens=6, temperature=1.5)
    message.sampling.seed = 7
    answer = await engine_client.generate(message)
    assert sum(event.HasField("accepted") for event in answer.events) == 1
    texts = [tuple(answer.tokens(index)) for index in range(4)]
    assert [len(text) for text in texts] == [6] * 4
    assert len(set(texts)) > 1
    for index in range(4):
        assert answer.finished(index).usage.completion_tokens == 6
    again = await engine_client.generate(message)
    assert [tuple(again.tokens(index)) for index in range(4)] == texts


async def test_a_text_prompt_is_tokenized_as_the_tokenizer_does(
    engine_client: Client, model_dir: Path
) -> None:
    text = "Once upon a time, 1234 héllo"
    ids = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text).ids
    by_text = await engine_client.generate(request(prompt=text))
    by_ids = await engine_client.generate(request(prompt=ids))
    assert by_text.events[0].accepted.prompt_tokens == len(ids)
    assert by_text.tokens() == by_ids.tokens()


async def test_the_end_token_is_part_of_the_last_delta(engine_client: Client) -> None:
    message = request(max_tokens=20)
    message.stopping.ignore_eos = False
    message.sampling.logit_bias[2] = 100.0
    answer = await engine_client.generate(message)
    assert answer.tokens() == [2]
    assert answer.finished().reason == pb.FINISH_REASON_STOP
    assert answer.finished().stop_token_id == 2


async def test_logprobs_come_one_per_token(engine_client: Client) -> None:
    message = request(max_tokens=4)
    message.response.logprobs = 3
    answer = await engine_client.generate(message)
    logprobs = [item for event in answer.events for item in event.delta.logprobs]
    assert len(logprobs) == 4
    for token, item in zip(answer.tokens(), logprobs, strict=True):
        assert item.rank == 1
        assert len(item.top_token_ids) == 3
        assert item.top_token_ids[0] == token
        assert item.top_logprobs[0] == pytest.approx(item.logprob)


async def test_a_grammar_is_waited_for_and_obeyed(engine_client: Client, model_dir: Path) -> None:
    message = request(prompt="Answer: ", max_tokens=60)
    message.stopping.ignore_eos = False
    message.structured_output.json_schema = (
        '{"type": "object", "properties": {"a": {"enum": [42]}}, "required": ["a"],'
        ' "additionalProperties": false}'
    )
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.OK
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = tokenizer.decode(answer.tokens()).replace(" ", "")
    assert text == '{"a":42}'
    assert answer.finished().reason == pb.FINISH_REASON_STOP
    assert answer.finished().timing.grammar_wait_us > 0


async def test_streams_share_steps(engine_client: Client) -> None:
    before = await engine_client.load()
    answers = await asyncio.gather(
        *(engine_client.generate(request(prompt=[i] * 4, max_tokens=40)) for i in range(16))
    )
    after = await engine_client.load()
    assert [len(answer.tokens()) for answer in answers] == [40] * 16
    assert after.generated_tokens - before.generated_tokens == 640
    assert after.num_steps - before.num_steps <= 80


# ---------------------------------------------------------------- refusals


async def test_bad_fields_are_named_by_their_path(engine_client: Client) -> None:
    message = request()
    message.sampling.temperature = 3
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.reason == "INVALID_VALUE"
    assert answer.fields == ["sampling.temperature"]
    assert answer.events == []


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_prompt_is_refused(engine_client: Client, prompt: list[int] | str) -> None:
    answer = await engine_client.generate(request(prompt=prompt))
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.fields == ["prompt"]


async def test_a_missing_prompt_is_refused(engine_client: Client) -> None:
    answer = await engine_client.generate(pb.GenerateRequest())
    assert (answer.code, answer.fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["prompt"])


@pytest.mark.parametrize("prompt", [[5] * 512, "1 " * 600, "a" * 1_000_000])
async def test_a_prompt_without_room_is_refused(
    engine_client: Client, prompt: list[int] | str
) -> None:
    answer = await engine_client.generate(request(prompt=prompt))
    assert answer.code is grpc.StatusCode.OUT_OF_RANGE
    assert answer.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "512" in answer.error


async def test_a_prompt_with_room_for_one_token(engine_client: Client) -> None:
    answer = await engine_client.generate(request(prompt=[5] * 511, max_tokens=9))
    assert len(answer.tokens()) == 1
    assert answer.finished().reason == pb.FINISH_REASON_LENGTH


async def test_a_wrong_model_and_a_stale_digest(engine_client: Client) -> None:
    message = request()
    message.model = "other"
    answer = await engine_client.generate(message)
    assert (answer.code, answer.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")
    message = request()
    message.tokenizer_digest = "old"
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.FAILED_PRECONDITION
    assert answer.reason == "TOKENIZER_STALE"


BAD_SCHEMAS = [
    '{"type": "nonsense"}',
    "{",
    "[1]",
    '{"$ref": "#/nowhere"}',
    r'{"type": "object", "properties": {"\ud800": {"type": "bogus"}}}',
    '{"properties": {"' + "p" * 9000 + '": {"type": "bogus"}}}',
]


@pytest.mark.parametrize("schema", BAD_SCHEMAS)
async def test_a_bad_schema_fails_its_call_alone(engine_client: Client, schema: str) -> None:
    message = request(n=2)
    message.structured_output.json_schema = schema
    neighbour = asyncio.create_task(engine_client.generate(request(max_tokens=30)))
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.fields == ["structured_output.json_schema"]
    assert answer.kinds() == []  # refused at the door
    assert len((await neighbour).tokens()) == 30


async def test_a_grammar_that_nothing_satisfies_fails_by_field(engine_client: Client) -> None:
    message = request()
    message.structured_output.grammar = 'root ::= "x" more\nmore ::= more "y"'
    answer = await engine_client.generate(message)
    assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
    assert answer.fields == ["structured_output"]


async def test_a_long_name_of_a_model_is_not_found(engine_client: Client) -> None:
    message = request()
    message.model = "x" * 9000
    answer = await engine_client.generate(message)
    assert (answer.code, answer.reason) == (grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND")


async def test_a_live_request_id_is_in_use(engine_client: Client) -> None:
    call = engine_client.engine.Generate(request(request_id="same", max_tokens=300, n=8))
    await call.read()
    answer = await engine_client.generate(request(request_id="same"))
    assert answer.code is grpc.StatusCode.ALREADY_EXISTS
    assert answer.reason == "REQUEST_ID_IN_USE"
    call.cancel()
    await engine_client.wait_idle(5)
    assert len((await engine_client.generate(request(request_id="same"))).tokens()) == 8


# ---------------------------------------------------------------- about the engine


async def test_infos(engine_client: Client) -> None:
    model = await engine_client.engine.GetModelInfo(pb.GetModelInfoRequest())
    assert (model.model, model.architecture) == ("tiny", "LlamaForCausalLM")
    assert (model.vocab_size, model.max_model_len) == (49_152, 512)
    assert (model.max_output_tokens, model.max_samples) == (300, 8)
    assert (model.max_queued_samples, model.max_queued_tokens) == (1024, 4_000_000)
    assert list(model.eos_token_ids) == [2]
    assert model.tokenizer_digest
    assert model.weights_digest
    assert model.created_unix_seconds > 1_700_000_000
    server = await engine_client.engine.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.device, server.dtype, server.quantization) == ("cpu", "float32", "int8")
    assert (server.block_size, server.num_blocks) == (16, 256)
    assert server.max_num_batched_tokens == 64
    assert server.core_starts == 1
    assert server.core_pid > 0
    assert server.op_backends


async def test_the_tokenizers_files(engine_client: Client, model_dir: Path) -> None:
    call = engine_client.engine.GetTokenizer(pb.GetTokenizerRequest())
    chunks = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in chunks)
    start = 0
    for file in chunks[0].files:
        content = data[start : start + file.size_bytes]
        assert content == (model_dir / file.name).read_bytes()
        start += file.size_bytes
    assert "tokenizer.json" in {file.name for file in chunks[0].files}
    known = pb.GetTokenizerRequest(known_digest=chunks[0].digest)
    (only,) = [chunk async for chunk in engine_client.engine.GetTokenizer(known)]
    assert not only.files


async def test_load_is_watched_at_once_and_every_second(engine_client: Client) -> None:
    waits: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        call = engine_client.engine.WatchLoad(pb.WatchLoadRequest())
        await call.read()
        waits.append(time.monotonic() - began)
        call.cancel()
    assert min(waits) < 0.5
    began = time.monotonic()
    call = engine_client.engine.WatchLoad(pb.WatchLoadRequest())
    for _ in range(3):
        report = await call.read()
        assert isinstance(report, pb.LoadReport)
        assert report.ready
        assert report.total_blocks == 256
    assert 1.5 < time.monotonic() - began < 20
    call.cancel()


async def test_health_knows_its_services(engine_client: Client) -> None:
    assert await engine_client.is_serving()
    assert await engine_client.is_serving("firsttoken.v1.Engine")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await engine_client.is_serving("nothing")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = engine_client.health.Watch(health_pb2.HealthCheckRequest(service="nothing"))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_reflection_lists_the_services(engine: Engine) -> None:
    async with grpc.aio.insecure_channel(engine.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"firsttoken.v1.Engine", "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_metrics_have_the_known_names(engine: Engine, engine_client: Client) -> None:
    await engine_client.generate(request())

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{engine.metrics}/metrics", timeout=5) as answer:
            return str(answer.read().decode())

    text = await asyncio.to_thread(scrape)
    label = '{model_name="tiny"}'
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "forced_tokens_total",
        "num_preemptions_total",
        "time_to_first_token_seconds_count",
        "inter_token_latency_seconds_count",
        "e2e_request_latency_seconds_count",
    ):
        assert f"vllm:{name}{label}" in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text
