"""Triton compiles a kernel anew for other alignments, for integers that 16 divides, for a 1: all
the forms that steps need are compiled before there are requests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine_service.bench_gpu_shapes import ModelShape

_SHAPE = ModelShape(
    name="tiny",
    hidden_size=128,
    intermediate_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=1000,
    tie_word_embeddings=True,
    max_model_len=4096,
    dtype="bfloat16",
)

# Nothing is launched: tokens are what the memory held, so it has to be zeros.
_COUNT = """
import random, sys
import torch
from triton.runtime.jit import JITFunction
from tests.kernels.hopper_compiler import compile_instead_of_launching

compile_instead_of_launching()
forms = set()


def compile_nothing(kernel, key, *_):
    forms.add((kernel.fn.__name__, key))


JITFunction._do_compile = compile_nothing
empty = torch.empty
torch.empty = lambda *shape, **options: empty(*shape, **options).zero_()

from engine_service.config import CacheConfig, CoreConfig, ModelConfig, SchedulerConfig
from engine_service.grammar_bitmask import GrammarBitmask
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_runner import ModelRunner
from engine_service.request import Request
from engine_service.scheduler_output import BlockCopy, ScheduledRequest, SchedulerOutput
from tests.pretend_gpu import PretendGpu

model_dir, quantization, num_blocks = sys.argv[1:]
config = CoreConfig(
    ModelConfig(
        model_dir,
        "tiny",
        load_format="dummy",
        kernels="triton",
        dtype="bfloat16",
        quantization=quantization,
        batch_invariant=True,
    ),
    CacheConfig(num_blocks=int(num_blocks) or None),
    SchedulerConfig(max_num_seqs=23, max_num_batched_tokens=256),
)
runner = ModelRunner(config, PretendGpu())
at_start = forms.copy()
names = {name for name, _ in at_start}
assert {"attend_splits_kernel", "attend_tiles_kernel", "_copy_kernel"} <= names

rng = random.Random(17)
params = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=0.7, top_p=0.9, num_logprobs=5, num_prompt_logprobs=0),
    SamplingParams(temperature=0.0, num_logprobs=0, frequency_penalty=0.5),
    SamplingParams(temperature=0.0, num_prompt_logprobs=16, logit_bias={1: 1.0, 5: 2.0}),
]
for step in range(1, 50):
    num_requests = rng.randrange(1, 24)
    shares = []
    for number in range(num_requests):
        context = rng.choice((0, 17, 300, 2000))
        num_tokens = rng.choice((1, 5, 10)) if step % 2 else 1
        token_ids = [0] * (context + num_tokens)
        request = Request(
            str(number), 0, token_ids, rng.choice(params), StoppingCriteria(max_tokens=5)
        )
        num_held = -(-len(token_ids) // 16)
        blocks = [rng.randrange(runner.num_blocks) for _ in range(num_held)]
        shares.append(ScheduledRequest.of(request, context, num_tokens, blocks))
    copies = [BlockCopy(number, number + 9) for number in range(step % 5)]
    plan = SchedulerOutput(step, shares, sum(s.num_scheduled_tokens for s in shares), copies)
    words = torch.full((1, 32), -1, dtype=torch.int32)
    bitmask = GrammarBitmask([0], words) if step % 3 == 0 else None
    runner.launch(plan, bitmask).wait()
    assert forms == at_start, (step, num_requests, forms - at_start)
print(len(forms))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing may be launched")
@pytest.mark.parametrize(
    ("quantization", "num_blocks"),  # 0: found out by the largest step
    [("none", "0"), ("int4", "400"), ("fp8", "400")],
)
def test_no_step_needs_a_kernel_to_be_compiled(
    quantization: str, num_blocks: str, tmp_path: Path
) -> None:
    _SHAPE.write_config(tmp_path)
    finished = subprocess.run(
        [sys.executable, "-c", _COUNT, str(tmp_path), quantization, num_blocks],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert 10 < int(finished.stdout) < 40
