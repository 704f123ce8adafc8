"""python -m engine_service.bench_gpu_part PART: measures items of one part in this process.

Started by `bench_gpu`, to which each line of the standard output is an event in JSON:

    {"device": {...}, "items": [...]}        the GPU, and what there is to measure
    {"item": NAME}                           begun
    {"item": NAME, "figures": {...}}         done
    {"item": NAME, "failure": "..."}         failed; the process ends if the GPU is unusable since
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from engine_service.bench_gpu_items import Item
from engine_service.bench_gpu_shapes import LLAMA_1B, LLAMA_8B, ModelShape

_SAMPLED_ROWS: Final = 256
_SEED: Final = 17


def _limits(_: Path) -> list[Item]:
    from engine_service import bench_gpu_limits

    return bench_gpu_limits.items()


def _checks(_: Path) -> list[Item]:
    from engine_service import bench_gpu_checks, bench_gpu_sampling

    if torch.cuda.is_available():
        device, sizes = torch.device("cuda"), bench_gpu_checks.Sizes.of_gpu()
        num_rows, vocab_size = 64, LLAMA_1B.vocab_size
    else:
        device, sizes = torch.device("cpu"), bench_gpu_checks.Sizes.of_interpreter()
        num_rows, vocab_size = 5, 1000
    return [
        *bench_gpu_checks.items(sizes, device),
        *bench_gpu_sampling.check_items(num_rows, vocab_size, device),
    ]


def _kernels(_: Path) -> list[Item]:
    from engine_service import bench_gpu_kernels, bench_gpu_sampling

    timings = bench_gpu_sampling.timing_items(_SAMPLED_ROWS, LLAMA_1B.vocab_size)
    return [*bench_gpu_kernels.items(), *timings]


def _engine(shape: ModelShape, with_ablations: bool, model_dir: Path) -> list[Item]:
    from engine_service import bench_gpu_engine
    from engine_service.cuda_device import CudaDevice

    sizes = bench_gpu_engine.Sizes.of_gpu(with_ablations)
    return bench_gpu_engine.EngineBench(shape, sizes, model_dir, CudaDevice).items()


def _transformers(shape: ModelShape) -> list[Item]:
    from engine_service.bench_gpu_engine import Sizes
    from engine_service.bench_gpu_transformers import TransformersBench

    loads = Sizes.of_gpu(with_ablations=False).decodes
    return TransformersBench(shape, loads, torch.device("cuda")).items()


# By name; the folder may hold a model's config.
PARTS: Final[Mapping[str, Callable[[Path], list[Item]]]] = {
    "limits": _limits,
    "checks": _checks,
    "kernels": _kernels,
    "engine-1b": lambda model_dir: _engine(LLAMA_1B, True, model_dir),
    "engine-8b": lambda model_dir: _engine(LLAMA_8B, False, model_dir),
    "transformers-1b": lambda _: _transformers(LLAMA_1B),
    "transformers-8b": lambda _: _transformers(LLAMA_8B),
}


def measure(items: list[Item], skipped: set[str], emit: Callable[[object], None]) -> None:
    """Ends early where a failure left the GPU unusable."""
    for item in items:
        if item.name in skipped:
            continue
        emit({"item": item.name})
        try:
            # Numbers in the interpreter may become infinite, as they may on a GPU.
            with np.errstate(all="ignore"):
                figures = item.measure()
        except Exception as error:
            traceback.print_exc()
            message = str(error).strip().partition("\n")[0]
            emit({"item": item.name, "failure": f"{type(error).__name__}: {message}"})
            if not _is_usable():
                return
            continue
        emit({"item": item.name, "figures": dict(figures)})


def _is_usable() -> bool:
    """Whether the GPU still computes; a memory fault ends that for the whole process."""
    if not torch.cuda.is_available():
        return True
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception:
        return False
    return True


def _describe_device() -> dict[str, object]:
    import triton

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if not torch.cuda.is_available():
        return {"name": "Triton's interpreter", **versions}
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        **versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_gpu_part", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--share", default="0/1", help="which of how many shares of the items")
    parser.add_argument("--skip", default="[]", help="names of items, as a list in JSON")
    arguments = parser.parse_args()
    # What libraries print must not come between the events.
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def emit(event: object) -> None:
        print(json.dumps(event), file=events, flush=True)

    torch.manual_seed(_SEED)
    with tempfile.TemporaryDirectory(prefix="firsttoken-bench-") as model_dir:
        share, num_shares = map(int, arguments.share.split("/"))
        items = PARTS[arguments.part](Path(model_dir))[share::num_shares]
        emit({"device": _describe_device(), "items": [item.name for item in items]})
        measure(items, set(json.loads(arguments.skip)), emit)


if __name__ == "__main__":
    main()
