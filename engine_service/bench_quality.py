"""python -m engine_service.bench_quality: what quantization costs in quality.

The same text, Python's own documentation of its language, in windows of 512 tokens, by each mode
and by torch in float32:

    perplexity     exp of the mean negative logprob of each token after the ones before it
    agreement      share of tokens where the likeliest next token is float32's
    logprob error  of the tokens of the text, against float32's: mean and largest

Prints a table and writes the same figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from tokenizers import Tokenizer

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.messages import SamplingParams, StoppingCriteria, TokenLogprobs
from engine_service.model_runner import ModelRunner
from engine_service.model_store import resolve_model
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest, SchedulerOutput

WINDOW_TOKENS: Final = 512
_CHUNK_TOKENS: Final = 128
_BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Mode:
    kernels: str
    quantization: str
    kv_cache_dtype: str

    def __str__(self) -> str:
        return f"{self.kernels} {self.quantization}, KV {self.kv_cache_dtype}"


REFERENCE: Final = Mode("reference", "none", "float32")
MODES: Final = (
    Mode("cpu", "none", "float32"),
    Mode("cpu", "none", "float16"),
    Mode("cpu", "int8", "float16"),
    Mode("cpu", "int4", "float32"),
    Mode("cpu", "int4", "float16"),
)


@dataclass(frozen=True, slots=True)
class Quality:
    perplexity: float
    perplexity_ratio: float  # to float32's
    agreement: float
    mean_logprob_error: float
    largest_logprob_error: float


def text_windows(model_dir: Path, num_windows: int) -> list[list[int]]:
    """Raises ValueError when the text is shorter."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    text = "\n\n".join(topics[name] for name in sorted(topics))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < num_windows * WINDOW_TOKENS:
        raise ValueError(f"The text has {len(ids)} tokens, {num_windows} windows need more.")
    return [ids[i * WINDOW_TOKENS : (i + 1) * WINDOW_TOKENS] for i in range(num_windows)]


def token_logprobs(
    model_dir: Path, mode: Mode, windows: Sequence[list[int]]
) -> list[TokenLogprobs]:
    """Of every token but each window's first."""
    runner = ModelRunner(
        CoreConfig(
            ModelConfig(
                str(model_dir), "quality", kernels=mode.kernels, quantization=mode.quantization
            ),
            CacheConfig(
                _BLOCK_SIZE,
                num_blocks=WINDOW_TOKENS // _BLOCK_SIZE,
                kv_cache_dtype=mode.kv_cache_dtype,
            ),
            SchedulerConfig(max_num_batched_tokens=WINDOW_TOKENS),
        )
    )
    params = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    blocks = list(range(WINDOW_TOKENS // _BLOCK_SIZE))
    entries: list[TokenLogprobs] = []
    for window in windows:
        request = Request("window", 0, window, params, StoppingCriteria(max_tokens=1))
        for start in range(0, len(window), _CHUNK_TOKENS):
            count = min(_CHUNK_TOKENS, len(window) - start)
            share = ScheduledRequest.of(request, start, count, blocks)
            told = runner.execute_model(SchedulerOutput(1, [share], count), None).prompt_logprobs
            entries += told[request.key]
            request.num_prefilled_tokens = start + count
    return entries


def compare(expected: Sequence[TokenLogprobs], found: Sequence[TokenLogprobs]) -> Quality:
    errors = [abs(a.logprob - b.logprob) for a, b in zip(expected, found, strict=True)]
    agreeing = sum(
        a.top_token_ids[0] == b.top_token_ids[0] for a, b in zip(expected, found, strict=True)
    )
    perplexity = _perplexity(found)
    return Quality(
        perplexity=perplexity,
        perplexity_ratio=perplexity / _perplexity(expected),
        agreement=agreeing / len(found),
        mean_logprob_error=math.fsum(errors) / len(errors),
        largest_logprob_error=max(errors),
    )


def _perplexity(entries: Sequence[TokenLogprobs]) -> float:
    return math.exp(-math.fsum(entry.logprob for entry in entries) / len(entries))


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_quality", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--model", help="directory or hub id; none: the embedded model")
    parser.add_argument("--windows", type=int, default=16, help=f"of {WINDOW_TOKENS} tokens")
    arguments = parser.parse_args()
    model_dir = resolve_model(arguments.model)
    windows = text_windows(model_dir, arguments.windows)
    expected = token_logprobs(model_dir, REFERENCE, windows)
    figures = {"reference": {"perplexity": _perplexity(expected)}}
    print(f"{'mode':<28} perplexity    ratio  agreement  mean error  largest")
    print(f"{REFERENCE!s:<28} {_perplexity(expected):10.4f}", flush=True)
    for mode in MODES:
        quality = compare(expected, token_logprobs(model_dir, mode, windows))
        print(
            f"{mode!s:<28} {quality.perplexity:10.4f} {quality.perplexity_ratio:8.5f} "
            f"{quality.agreement:10.2%} {quality.mean_logprob_error:11.5f} "
            f"{quality.largest_logprob_error:8.4f}",
            flush=True,
        )
        figures[str(mode)] = asdict(quality)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
