"""The engine service's flags, named as users know them, and the configuration they make.

Light to import: `--print-flags` answers without loading gRPC or torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from access.keys import digest_of
from engine_service.config import (
    CacheConfig,
    CoreConfig,
    GrammarConfig,
    ModelConfig,
    SchedulerConfig,
    ServiceConfig,
)
from engine_service.edge_flags import add_edge_flags, edge_config, key
from engine_service.logs import LEVELS
from traces.otlp import otlp_flag
from traces.setup import trace_directory

_MODEL, _CACHE, _SCHEDULER = ModelConfig("", ""), CacheConfig(), SchedulerConfig()
_GRAMMAR = GrammarConfig()
_SERVICE = ServiceConfig(CoreConfig(_MODEL))

# A step with 128 tokens of new prompts in it takes about that long on two cores of a CPU.
TARGET_ITL_MS = 150.0
ADMIN_KEY_VARIABLE = "FIRSTTOKEN_ADMIN_KEY"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")  # one clear line; --help has the rest


def _whole(low: int, high: int = 2**62) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be within [{low}, {high}], not {value}")
        return value

    return integer


def _real(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not (math.isfinite(value) and low <= value <= high):
            raise argparse.ArgumentTypeError(f"must be within [{low:g}, {high:g}], not {text}")
        return value

    return number


def _weights(text: str) -> dict[str, float]:
    """`a=2,b=0.5`; a name is what comes before the last `=`."""
    weight_of = _real(1e-3, 1e3)
    weights: dict[str, float] = {}
    for item in text.split(","):
        name, equals, weight = item.rpartition("=")
        if not (name and equals):
            raise argparse.ArgumentTypeError(f"must read NAME=WEIGHT,..., not {text!r}")
        weights[name] = weight_of(weight)
    return weights


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="firsttoken engine",
        description="Serves one model over gRPC.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="directory or hub id; none: the embedded model")
    parser.add_argument("--print-flags", action="store_true", help="print the flags as JSON")
    _add_endpoint_flags(parser)
    _add_model_flags(parser)
    _add_cache_flags(parser)
    _add_scheduler_flags(parser)
    _add_grammar_flags(parser)
    _add_trace_flags(parser)
    return parser


def _add_endpoint_flags(parser: argparse.ArgumentParser) -> None:
    port = _whole(0, 65535)
    add = parser.add_argument
    add("--grpc-host", default=_SERVICE.grpc_host, help="address of gRPC and metrics")
    add("--grpc-port", type=port, default=_SERVICE.grpc_port, help="0: any free port")
    add("--engine-metrics-port", type=port, default=_SERVICE.metrics_port, help="0: any free port")
    add(
        "--shutdown-timeout",
        type=_real(0, 86_400),
        default=_SERVICE.shutdown_timeout_seconds,
        help="seconds that running requests get on SIGTERM",
    )
    add(
        "--admin-key",
        type=key,
        help="credential of the Control service, which is closed without one"
        f" (or the environment variable {ADMIN_KEY_VARIABLE})",
    )
    add_edge_flags(add)
    add("--log-level", choices=LEVELS, default=_SERVICE.log_level, help="what goes to stderr")
    add(
        "--core-in-process",
        action="store_true",
        help="run the engine core as a thread of the service",
    )


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--served-model-name", help="name in requests; none: the directory's")
    add("--device", choices=("auto", "cpu", "cuda"), default=_MODEL.device, help="where it runs")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=_MODEL.dtype,
        help="of weights and activations; auto: float32 on a CPU, half precision on a GPU",
    )
    add(
        "--load-format",
        choices=("auto", "dummy"),
        default=_MODEL.load_format,
        help="auto: the model's weights; dummy: random ones, to measure with",
    )
    add(
        "--quantization",
        choices=("auto", "none", "int8", "int4", "fp8"),
        default=_MODEL.quantization,
        help="of the weights; auto: on a CPU int4 if 4 bits are all they have, else int8",
    )
    add(
        "--kernels",
        choices=("auto", "cpu", "triton", "reference"),
        default=_MODEL.kernels,
        help="what computes; auto: on a CPU the compiled kernels, on a GPU Triton's",
    )
    add("--max-model-len", type=_whole(2), help="context in tokens; none: the model's")
    add("--num-threads", type=_whole(1, 1024), help="of the compute kernels; none: torch's choice")
    add(
        "--batch-invariant",
        action="store_true",
        help="the same tokens whatever else is in the batch; the CPU kernels always do so, "
        "for others it is slower",
    )
    add(
        "--generation-config",
        choices=("auto", "vllm", "none"),
        default=_MODEL.generation_config,
        help="sampling defaults; auto: the model's generation_config.json; vllm, none: neutral",
    )


def _add_cache_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--block-size", type=_whole(1, 256), default=_CACHE.block_size, help="tokens in a KV block")
    add(
        "--kv-cache-memory-bytes",
        type=_whole(1),
        help="none: 2 GiB or a quarter of free memory; on CUDA see --gpu-memory-utilization",
    )
    add(
        "--gpu-memory-utilization",
        type=_real(0.01, 1.0),
        default=_CACHE.gpu_memory_utilization,
        help="share of a CUDA device for weights and KV cache; the rest is for activations",
    )
    add("--num-gpu-blocks-override", type=_whole(1), help="KV blocks, in place of the arithmetic")
    add(
        "--kv-cache-dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default=_CACHE.kv_cache_dtype,
        help="auto: float16 on the CPU kernels, else the model's",
    )
    add(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=_CACHE.enable_prefix_caching,
        help="reuse the KV of equal prefixes",
    )


def _add_scheduler_flags(parser: argparse.ArgumentParser) -> None:
    for flag, default, meaning in (
        ("--max-num-queued-reqs", _SCHEDULER.max_num_queued_reqs, "samples waiting"),
        ("--max-num-queued-tokens", _SCHEDULER.max_num_queued_tokens, "prompt tokens waiting"),
        ("--max-samples", _SCHEDULER.max_samples, "cap on n"),
    ):
        parser.add_argument(flag, type=_whole(1), default=default, help=meaning)
    add = parser.add_argument
    add(
        "--max-num-seqs",
        type=_whole(1),
        help="samples running at once; none: 64, on a GPU 256",
    )
    add(
        "--max-num-batched-tokens",
        type=_whole(1),
        help="tokens in a step; none: 256, on a GPU 2048",
    )
    add("--max-output-tokens", type=_whole(1), help="cap per sample; none: the context")
    add(
        "--max-queue-wait",
        type=_real(0.001, 86_400),
        help="seconds; a request whose predicted wait is longer is refused at once",
    )
    add(
        "--queue-timeout",
        type=_real(0.001, 86_400),
        help="seconds after which a request that still waits for its first step fails",
    )
    add(
        "--long-prefill-token-threshold",
        type=_whole(0),
        default=_SCHEDULER.long_prefill_token_threshold,
        help="tokens of one prompt in a step; 0: as many as there is room for",
    )
    add(
        "--target-itl-ms",
        type=_real(0, 60_000),
        default=TARGET_ITL_MS,
        help="milliseconds between two tokens of a stream that prompts leave it; 0: no target",
    )
    add(
        "--tenant-weights",
        type=_weights,
        default={},
        metavar="NAME=WEIGHT,...",
        help="shares of the tokens; a tenant that isn't named weighs 1",
    )
    add(
        "--priority-aging",
        type=_real(0.001, 86_400),
        default=_SCHEDULER.priority_aging_seconds,
        help="seconds of waiting that make up for one unit of priority",
    )
    add(
        "--priority-range",
        type=_whole(0, 1_000),
        default=_SCHEDULER.priority_range,
        help="N: a request's priority is clamped to [-N, N]; lower runs first",
    )


def _add_grammar_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--enable-jump-forward",
        action=argparse.BooleanOptionalAction,
        default=_SCHEDULER.enable_jump_forward,
        help="take a token that is the only one a grammar allows without a step",
    )
    parser.add_argument(
        "--grammar-compile-timeout",
        type=_real(0.1, 3_600),
        default=_GRAMMAR.compile_timeout_seconds,
        help="seconds of processor time in which a grammar must compile",
    )


def _add_trace_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--trace-dir",
        metavar="DIR",
        help="the local trace store, or none ($FIRSTTOKEN_TRACE_DIR, else under the user's cache)",
    )
    add(
        "--otlp-traces-endpoint",
        type=otlp_flag,
        metavar="ENDPOINT",
        help="OTLP collector: HOST:4317 (gRPC), or http://HOST:4318/v1/traces (HTTP);"
        " $OTEL_EXPORTER_OTLP_PROTOCOL tells which, too",
    )
    add(
        "--trace-sample-ratio",
        type=_real(0, 1),
        default=_SERVICE.trace_sample_ratio,
        help="share of the traces started here that is kept",
    )
    add(
        "--trace-slow-ttft-ms",
        type=_real(0, 3_600_000),
        default=_SERVICE.trace_slow_ttft_ms,
        help="of the others, those whose first token takes longer are kept all the same; 0: none",
    )


def to_config(arguments: argparse.Namespace, model_dir: Path, model_name: str) -> ServiceConfig:
    """`model_name`: what the model is called unless a flag says otherwise. Raises ValueError for
    flags that can't go together."""
    admin_key = arguments.admin_key or os.environ.get(ADMIN_KEY_VARIABLE)
    core = CoreConfig(
        model=ModelConfig(
            model_dir=str(model_dir),
            served_model_name=arguments.served_model_name or model_name,
            device=arguments.device,
            dtype=arguments.dtype,
            load_format=arguments.load_format,
            quantization=arguments.quantization,
            kernels=arguments.kernels,
            max_model_len=arguments.max_model_len,
            batch_invariant=arguments.batch_invariant,
            generation_config=arguments.generation_config,
        ),
        cache=CacheConfig(
            block_size=arguments.block_size,
            kv_cache_memory_bytes=arguments.kv_cache_memory_bytes,
            gpu_memory_utilization=arguments.gpu_memory_utilization,
            num_blocks=arguments.num_gpu_blocks_override,
            kv_cache_dtype=arguments.kv_cache_dtype,
            enable_prefix_caching=arguments.enable_prefix_caching,
        ),
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.max_num_seqs or 0,
            max_num_batched_tokens=arguments.max_num_batched_tokens or 0,
            max_num_queued_reqs=arguments.max_num_queued_reqs,
            max_num_queued_tokens=arguments.max_num_queued_tokens,
            max_output_tokens=arguments.max_output_tokens,
            max_samples=arguments.max_samples,
            max_queue_wait_seconds=arguments.max_queue_wait,
            queue_timeout_seconds=arguments.queue_timeout,
            long_prefill_token_threshold=arguments.long_prefill_token_threshold,
            target_itl_ms=arguments.target_itl_ms or None,
            tenant_weights=arguments.tenant_weights,
            priority_aging_seconds=arguments.priority_aging,
            priority_range=arguments.priority_range,
            enable_jump_forward=arguments.enable_jump_forward,
        ),
        grammar=GrammarConfig(compile_timeout_seconds=arguments.grammar_compile_timeout),
        num_threads=arguments.num_threads,
    )
    return ServiceConfig(
        core=core,
        grpc_host=arguments.grpc_host,
        grpc_port=arguments.grpc_port,
        metrics_port=arguments.engine_metrics_port,
        shutdown_timeout_seconds=arguments.shutdown_timeout,
        trace_dir=trace_directory(arguments.trace_dir),
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
        trace_sample_ratio=arguments.trace_sample_ratio,
        trace_slow_ttft_ms=arguments.trace_slow_ttft_ms,
        admin_key_digest=digest_of(admin_key) if admin_key else b"",
        edge=edge_config(arguments),
        core_in_process=arguments.core_in_process,
        log_level=arguments.log_level,
    )


def flags_as_json(parser: argparse.ArgumentParser) -> str:
    """For `firsttoken serve`, which hands each flag to the process that owns it."""
    hidden = {"help", "print_flags"}
    flags: list[dict[str, Sequence[str] | str | bool | int | float | None]] = [
        {
            "flags": list(action.option_strings),
            "dest": action.dest,
            "takes_value": action.nargs != 0,
            "default": action.default,
            "help": action.help,
        }
        for action in parser._actions
        if action.option_strings and action.dest not in hidden
    ]
    return json.dumps(flags)
