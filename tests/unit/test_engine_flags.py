"""Flags of the engine service: their JSON, their values, their refusals."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from access.keys import plain_keys
from engine_service.config import (
    CacheConfig,
    CoreConfig,
    EdgeConfig,
    GrammarConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
)
from engine_service.flags import TARGET_ITL_MS, build_parser, to_config

FLAGS = [
    "--admin-key",
    "--api-key",
    "--api-keys-file",
    "--batch-invariant",
    "--block-size",
    "--core-in-process",
    "--device",
    "--dtype",
    "--enable-jump-forward",
    "--enable-prefix-caching",
    "--engine-metrics-port",
    "--generation-config",
    "--gpu-memory-utilization",
    "--grammar-compile-timeout",
    "--grpc-host",
    "--grpc-port",
    "--grpc-ssl-ca-certs",
    "--grpc-ssl-certfile",
    "--grpc-ssl-keyfile",
    "--kernels",
    "--kv-cache-dtype",
    "--kv-cache-memory-bytes",
    "--load-format",
    "--log-level",
    "--long-prefill-token-threshold",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-queued-reqs",
    "--max-num-queued-tokens",
    "--max-num-seqs",
    "--max-output-tokens",
    "--max-queue-wait",
    "--max-samples",
    "--num-gpu-blocks-override",
    "--num-threads",
    "--otlp-traces-endpoint",
    "--priority-aging",
    "--priority-range",
    "--quantization",
    "--queue-timeout",
    "--served-model-name",
    "--shutdown-timeout",
    "--target-itl-ms",
    "--tenant-weights",
    "--trace-dir",
    "--trace-sample-ratio",
    "--trace-slow-ttft-ms",
    "--trusted-api-key",
]


def parse(*flags: str) -> ServiceConfig:
    return to_config(build_parser().parse_args(flags), Path("/models/tiny"), "tiny")


def test_without_flags_the_configuration_is_the_default_one() -> None:
    # No target in tests, which are not timed; and the device says how large its steps are.
    scheduler = SchedulerConfig(
        target_itl_ms=TARGET_ITL_MS, max_num_seqs=0, max_num_batched_tokens=0
    )
    expected = CoreConfig(ModelConfig("/models/tiny", "tiny"), scheduler=scheduler)
    assert parse() == ServiceConfig(expected)


def test_flags_reach_their_fields() -> None:
    config = parse(
        "--served-model-name=m",
        "--max-model-len=100",
        "--batch-invariant",
        "--block-size=8",
        "--num-gpu-blocks-override=9",
        "--no-enable-prefix-caching",
        "--max-num-seqs=3",
        "--max-samples=4",
        "--max-num-queued-reqs=5",
        "--num-threads=2",
        "--grpc-port=0",
        "--shutdown-timeout=1.5",
        "--core-in-process",
        "--trace-dir=/t",
        "--trace-sample-ratio=0.25",
        "--generation-config=vllm",
    )
    assert config.core.model == ModelConfig(
        "/models/tiny",
        "m",
        max_model_len=100,
        batch_invariant=True,
        generation_config="vllm",
    )
    assert config.core.cache == CacheConfig(8, num_blocks=9, enable_prefix_caching=False)
    assert config.core.scheduler == SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=0,
        max_num_queued_reqs=5,
        max_samples=4,
        target_itl_ms=TARGET_ITL_MS,
    )
    assert config.core.num_threads == 2
    assert (config.grpc_port, config.shutdown_timeout_seconds) == (0, 1.5)
    assert (config.trace_dir, config.trace_sample_ratio) == ("/t", 0.25)
    assert config.core_in_process


def test_the_admin_key_is_kept_as_its_digest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(b"hunter2").digest()
    given = parse("--admin-key=hunter2")
    assert given.admin_key_digest == digest
    assert "hunter2" not in repr(given)
    monkeypatch.setenv("FIRSTTOKEN_ADMIN_KEY", "hunter2")
    assert parse().admin_key_digest == digest
    monkeypatch.setenv("FIRSTTOKEN_ADMIN_KEY", "")
    assert parse().admin_key_digest == b""


def test_flags_of_the_edge(monkeypatch: pytest.MonkeyPatch) -> None:
    edge = parse(
        *("--api-key=one", "--api-key=two", "--api-keys-file=/k.yaml", "--trusted-api-key=t"),
        *("--ssl-certfile=/c", "--grpc-ssl-keyfile=/k", "--ssl-ca-certs=/ca"),
    ).edge
    assert edge == EdgeConfig(
        api_keys=plain_keys(["one", "two"]),
        api_keys_file=Path("/k.yaml"),
        trusted_key_digest=hashlib.sha256(b"t").digest(),
        ssl_certfile=Path("/c"),
        ssl_keyfile=Path("/k"),
        ssl_ca_certs=Path("/ca"),
    )
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "plain")
    monkeypatch.setenv("FIRSTTOKEN_ENGINE_API_KEY", "fronts")
    assert parse().edge.api_keys == plain_keys(["plain"])
    assert parse().edge.trusted_key_digest == hashlib.sha256(b"fronts").digest()
    monkeypatch.setenv("FIRSTTOKEN_API_KEY", "two words")
    with pytest.raises(ValueError, match=r"\$FIRSTTOKEN_API_KEY"):
        parse()


@pytest.mark.parametrize(
    "flags", [("--ssl-certfile=/c",), ("--grpc-ssl-keyfile=/k",), ("--ssl-ca-certs=/ca",)]
)
def test_flags_of_tls_go_together(flags: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--ssl-certfile and --ssl-keyfile"):
        parse(*flags)


def test_flags_of_grammars() -> None:
    core = parse("--grammar-compile-timeout=1.5", "--no-enable-jump-forward").core
    assert core.grammar == GrammarConfig(compile_timeout_seconds=1.5)
    assert not core.scheduler.enable_jump_forward


def test_flags_of_the_door() -> None:
    limits = parse("--max-queue-wait=2.5", "--queue-timeout=9", "--priority-range=0").core.scheduler
    assert (limits.max_queue_wait_seconds, limits.queue_timeout_seconds) == (2.5, 9)
    assert limits.priority_range == 0


def test_flags_of_the_policy() -> None:
    policy = parse(
        "--long-prefill-token-threshold=64",
        "--target-itl-ms=40",
        "--tenant-weights=a=2,odd=name=0.5",
        "--priority-aging=5",
    ).core.scheduler
    assert (policy.long_prefill_token_threshold, policy.target_itl_ms) == (64, 40)
    assert policy.tenant_weights == {"a": 2, "odd=name": 0.5}
    assert policy.priority_aging_seconds == 5
    assert parse("--target-itl-ms=0").core.scheduler.target_itl_ms is None


@pytest.mark.parametrize(
    "flag",
    [
        "--target-itl-ms=-1",
        "--tenant-weights=a",
        "--tenant-weights=a=0",
        "--tenant-weights==2",
        "--tenant-weights=a=1,,b=2",
        "--priority-aging=0",
        "--grpc-port=70000",
        "--grpc-port=x",
        "--max-num-seqs=0",
        "--block-size=-1",
        "--dtype=int3",
        "--trace-sample-ratio=nan",
        "--shutdown-timeout=-1",
        "--max-model-len=1",
        "--admin-key=two words",
        "--max-queue-wait=0",
        "--queue-timeout=nan",
        "--priority-range=-1",
        "--no-such-flag",
    ],
)
def test_bad_values_exit_with_one_line(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(flag)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert flag.split("=")[0] in error


def test_printed_flags_are_json_and_need_no_heavy_import() -> None:
    script = (
        "import runpy, sys; sys.argv = ['engine_service', '--print-flags']\n"
        "try: runpy.run_module('engine_service', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'grpc', 'xgrammar', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    flags = json.loads(result.stdout)
    by_name = {flag["flags"][0]: flag for flag in flags}
    assert sorted(by_name) == FLAGS
    assert by_name["--grpc-port"] == {
        "flags": ["--grpc-port"],
        "dest": "grpc_port",
        "takes_value": True,
        "default": 50051,
        "help": "0: any free port",
    }
    assert by_name["--enable-prefix-caching"]["flags"][1] == "--no-enable-prefix-caching"
    assert not by_name["--enable-prefix-caching"]["takes_value"]
    assert not by_name["--core-in-process"]["takes_value"]
