"""python -m engine_service.bench_grammar --json PATH: what structured output costs.

    step          ms a step takes with and without grammars, all of a batch constrained
    jump_forward  steps that the same requests take with it and without
    compile       ms from submission to readiness, for each kind: compiled, and found in the cache
    storm         ms between the tokens of running streams while 50 fresh schemas compile

The embedded model, in this process; grammars compile in a process of their own, as always.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine_service.bench_core import Figures, table
from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.core_process import build_core
from engine_service.engine_core import EngineCore
from engine_service.mailbox import Mailbox
from engine_service.messages import (
    AddRequest,
    CoreStats,
    Frame,
    SamplingParams,
    StepFrame,
    StoppingCriteria,
    StructuredOutput,
)
from engine_service.model_store import resolve_model

BATCHES: Final = (1, 8, 32)
STORM_SCHEMAS: Final = 50
STORM_STREAMS: Final = 4
_ROUNDS: Final = 3  # plain and constrained in turns: a machine's hours differ
_NUM_STEPS: Final = 48
_PROMPT_TOKENS: Final = 32
_STORM_STEPS: Final = 3000


def person_schema(number: int) -> StructuredOutput:
    """Another grammar for each number, of strings, numbers, choices and a list."""
    schema = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "minLength": 1, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z]{1,20}@[a-z]{1,20}\\.com$"},
            "kind": {"enum": ["customer", "supplier", "partner"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        "required": [f"name_{number}", "age", "email", "kind", "tags"],
        "additionalProperties": False,
    }
    return StructuredOutput("json_schema", json.dumps(schema))


# Long enough that no step of the measurement ends a request.
_LONG: Final = StructuredOutput(
    "json_schema",
    json.dumps({"type": "array", "items": json.loads(person_schema(0).source), "minItems": 20}),
)
SOURCES: Final[dict[str, StructuredOutput]] = {
    "schema_person": person_schema(0),
    "schema_of_any_json": StructuredOutput("json_schema", "{}"),
    "json_object": StructuredOutput("json_object"),
    "regex": StructuredOutput("regex", "[A-Z][a-z]{1,20}, [0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "grammar": StructuredOutput("grammar", 'root ::= [0-9]+ (("+" | "*") root)?'),
    "choice_1000": StructuredOutput("choice", json.dumps([f"answer {i}" for i in range(1000)])),
    "structural_tag": StructuredOutput(
        "structural_tag",
        json.dumps(
            {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<call>"],
                    "tags": [
                        {
                            "type": "tag",
                            "begin": "<call>",
                            "content": {
                                "type": "json_schema",
                                "json_schema": json.loads(person_schema(0).source),
                            },
                            "end": "</call>",
                        }
                    ],
                },
            }
        ),
    ),
}


class _Channel:
    def __init__(self) -> None:
        self.mailbox = Mailbox()
        self.stats = CoreStats()
        self.num_finished = 0

    def send(self, frame: Frame) -> None:
        if isinstance(frame, StepFrame):
            self.stats = frame.stats
            self.num_finished += sum(output.finish is not None for output in frame.outputs)


class Bench:
    """One core; its model is loaded once for all that is measured with the same settings."""

    def __init__(self, model_dir: Path, *, enable_jump_forward: bool) -> None:
        config = CoreConfig(
            ModelConfig(str(model_dir), "bench"),
            CacheConfig(num_blocks=1024, enable_prefix_caching=False),
            SchedulerConfig(enable_jump_forward=enable_jump_forward, max_num_batched_tokens=256),
        )
        self._channel = _Channel()
        self._core: EngineCore
        self._core, _ = build_core(config, self._channel)
        self._num_requests = 0

    @property
    def stats(self) -> CoreStats:
        return self._channel.stats

    def close(self) -> None:
        self._core.close()

    def add(
        self, structured_output: StructuredOutput | None, max_tokens: int, number: int = 0
    ) -> None:
        """Requests of the same number have the same prompt and seed."""
        self._num_requests += 1
        request = AddRequest(
            f"r{self._num_requests}",
            [20 + (7 * number + 13 * i) % 40_000 for i in range(_PROMPT_TOKENS)],
            SamplingParams(temperature=0.7, seed=number),
            StoppingCriteria(max_tokens, eos_token_ids=(2,) if structured_output else ()),
            structured_output,
            arrival_ns=time.monotonic_ns(),
        )
        self._channel.mailbox.put([request])

    def step_ms(self) -> float:
        start = time.perf_counter()
        self._core.step()
        return (time.perf_counter() - start) * 1000

    def run(self) -> None:
        """Until nothing is left."""
        while self._channel.num_finished < self._num_requests:
            if not self._core.step():
                time.sleep(0.001)  # all that is left waits for its grammar

    def decode_ms(self, structured_output: StructuredOutput | None, batch: int) -> float:
        """The median of a step in which each of the batch gets one token."""
        for number in range(batch):
            self.add(structured_output, _NUM_STEPS + 8, number)
        while self.stats.num_running < batch:
            if self._channel.num_finished == self._num_requests:
                raise RuntimeError("the requests of a batch ended before its last one began")
            self._core.step()
        times = [self.step_ms() for _ in range(_NUM_STEPS - batch // 4)]
        self.run()
        return statistics.median(times)


def measure_step(bench: Bench) -> Figures:
    figures: Figures = {}
    for batch in BATCHES:
        plain, constrained = [], []
        for _ in range(_ROUNDS):
            plain.append(bench.decode_ms(None, batch))
            constrained.append(bench.decode_ms(_LONG, batch))
        figures[f"plain_{batch}_ms"] = min(plain)
        figures[f"constrained_{batch}_ms"] = min(constrained)
        figures[f"cost_{batch}_percent"] = 100 * (min(constrained) / min(plain) - 1)
    return figures


def measure_jump_forward(with_it: Bench, without: Bench, num_requests: int = 8) -> Figures:
    figures: Figures = {}
    for name, bench in (("with", with_it), ("without", without)):
        before = bench.stats
        for number in range(num_requests):  # one after the other: a step is a request's own
            bench.add(person_schema(0), 120, number)
            bench.run()
        after = bench.stats
        figures[f"steps_{name}"] = after.num_steps - before.num_steps
        figures[f"tokens_{name}"] = after.num_generated_tokens - before.num_generated_tokens
        figures[f"forced_{name}"] = after.num_forced_tokens - before.num_forced_tokens
    return figures


def measure_compile(bench: Bench) -> Figures:
    figures: Figures = {}
    for state in ("compiled", "cached"):
        for name, source in SOURCES.items():
            unseen = msgspec.structs.replace(source, source=source.source + " ")
            start = time.perf_counter()
            bench.add(unseen if source.kind == "json_schema" else source, 1)
            bench.run()
            figures[f"{name}_{state}_ms"] = (time.perf_counter() - start) * 1000
    return figures


def measure_storm(bench: Bench) -> Figures:
    """The streams are the same with and without the storm, and so is the number of their steps."""
    figures: Figures = {}
    bench.add(person_schema(0), 1)  # whatever the first grammar waits for is there
    for name, num_schemas in (("calm", 0), ("storm", STORM_SCHEMAS)):
        bench.run()
        for number in range(STORM_STREAMS):
            bench.add(None, _STORM_STEPS + 100, number)
        while bench.stats.num_running < STORM_STREAMS:
            bench.step_ms()
        for number in range(num_schemas):
            bench.add(person_schema(1_000 + number), 1)
        gaps = [bench.step_ms() for _ in range(_STORM_STEPS)]
        figures[f"{name}_p50_ms"] = statistics.median(gaps)
        figures[f"{name}_p99_ms"] = _percentile(gaps, 99)
    figures["p99_ratio"] = figures["storm_p99_ms"] / figures["calm_p99_ms"]
    figures["seconds"] = sum(gaps) / 1000
    figures["compiled"] = STORM_SCHEMAS - bench.stats.num_waiting
    return figures


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def measure_start(bench: Bench) -> Figures:
    """To be the first: nothing is loaded yet."""
    start = time.perf_counter()
    bench.add(SOURCES["regex"], 1)
    bench.run()
    return {"first_grammar_seconds": time.perf_counter() - start}


PARTS: Final = ("step", "jump_forward", "compile", "storm")


def measure(model_dir: Path, parts: Sequence[str]) -> dict[str, Figures]:
    without = Bench(model_dir, enable_jump_forward=False)
    with_it = Bench(model_dir, enable_jump_forward=True)
    figures = {"start": measure_start(without)}
    if "step" in parts:
        figures["step"] = measure_step(without)
    if "jump_forward" in parts:
        figures["jump_forward"] = measure_jump_forward(with_it, without)
    if "compile" in parts:
        figures["compile"] = measure_compile(without)
    if "storm" in parts:
        figures["storm"] = measure_storm(with_it)
    for bench in (with_it, without):
        bench.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_grammar", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="directory or hub id; none: the embedded model")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts to measure")
    arguments = parser.parse_args()
    parts = measure(resolve_model(arguments.model), arguments.only)
    print(table(parts))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(parts, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
