"""From parsed flags to plans, and to how a server is asked.

Flags that exclude each other end the process as argparse does: that is what `parser` is for.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

from clients.bench.compare import ComparePlan
from clients.bench.flags import API_KEY_VARIABLE
from clients.bench.run import Plan
from clients.bench.sweep import SweepPlan
from clients.bench.target import Api, TargetOptions
from clients.bench.targets import GRPC_SCHEME
from clients.bench.workloads import Sizes, Window, Workload


def bench_plans(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[Plan]:
    workload = Workload(given.workload)
    if workload.is_window and given.requests is not None:
        parser.error("argument --requests: w5 lasts --duration seconds, not some requests")
    return Plan(
        workload=workload,
        concurrency=given.concurrency,
        seed=_seed(given),
        num_requests=given.requests,
        num_warmup=given.warmup,
        sizes=_window_sizes(given),
        window=_window(given),
    ).with_baseline()


def compare_plan(given: argparse.Namespace) -> ComparePlan:
    return ComparePlan(
        loads=given.workloads,
        num_repeats=given.repeats,
        seed=_seed(given),
        num_warmup=given.warmup,
        sizes=_window_sizes(given),
        window=_window(given),
    )


def sweep_plan(parser: argparse.ArgumentParser, given: argparse.Namespace) -> SweepPlan:
    if given.start > given.end:
        parser.error("argument --start: must not be more than --end")
    return SweepPlan(
        workload=Workload(given.workload),
        itl_p99_ms=given.itl_p99_ms,
        seed=_seed(given),
        start=given.start,
        end=given.end,
        num_requests=given.requests,
        num_warmup=given.warmup,
        sizes=_sizes(given),
    )


def server_options(parser: argparse.ArgumentParser, given: argparse.Namespace) -> TargetOptions:
    key = given.api_key or os.environ.get(API_KEY_VARIABLE)
    return _options(parser, given, given.address, given.model, key)


def side_options(
    parser: argparse.ArgumentParser, given: argparse.Namespace
) -> tuple[TargetOptions, TargetOptions]:
    """Of A and B. Each key goes to its own server; that of the environment goes to neither."""
    return (
        _options(parser, given, given.a, given.model_a, given.api_key_a),
        _options(parser, given, given.b, given.model_b, given.api_key_b),
    )


def _options(
    parser: argparse.ArgumentParser,
    given: argparse.Namespace,
    address: str,
    model: str | None,
    api_key: str | None,
) -> TargetOptions:
    is_grpc = address.startswith(GRPC_SCHEME)
    if given.extra_fields and is_grpc:
        parser.error("argument --extra-fields: gRPC has no body to put them into")
    if given.send_text and not is_grpc:
        parser.error("argument --send-text: is for gRPC; over HTTP prompts always go as text")
    return TargetOptions(
        model=model,
        api_key=api_key,
        api=None if given.api is None else Api(given.api),
        is_ignoring_eos=not given.no_ignore_eos,
        timeout_seconds=given.timeout,
        extra_fields=given.extra_fields,
        sends_text=given.send_text,
    )


def _seed(given: argparse.Namespace) -> str:
    return given.seed or f"{time.time_ns() // 1_000_000:x}"


def _sizes(given: argparse.Namespace) -> Sizes:
    return Sizes(given.prompt_tokens, given.prefix_tokens, given.max_tokens)


def _window_sizes(given: argparse.Namespace) -> Sizes:
    return replace(
        _sizes(given),
        long_prompt_tokens=given.long_prompt_tokens,
        long_max_tokens=given.long_max_tokens,
    )


def _window(given: argparse.Namespace) -> Window:
    return Window(
        duration_seconds=given.duration,
        grace_seconds=given.grace,
        num_long=given.num_long,
        long_interval_seconds=given.long_interval,
    )
