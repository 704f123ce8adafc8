"""Hidden states and logits, bit by bit: alone or among others, in one chunk or in many.

With batch-invariant ops a token's row follows from the tokens before it alone; with the plain ones
it does not, which is what makes the first half worth something.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_service.input_batch import build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_loader import Checkpoint
from engine_service.models.config import read_config
from engine_service.models.decoder import Decoder
from engine_service.models.weights import load_weights
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest
from kernels.ops import batch_invariant_ops, reference_ops
from tests.conftest import MakeTinyModel

BLOCK_SIZE, NUM_BLOCKS = 16, 64
LENGTH = 150  # of the request that is looked at

Share = tuple[int, int, int]  # request, first token, number of tokens


class Model:
    """A decoder and a pool of NaNs, given steps by hand; requests own blocks of a random order."""

    def __init__(self, model_dir: Path, batch_invariant: bool) -> None:
        config = read_config(model_dir)
        device = torch.device("cpu")
        with Checkpoint(model_dir) as checkpoint:
            weights = load_weights(config, lambda n: checkpoint.load(n, torch.float32, device))
        layer = weights.layers[0]
        matrices = (layer.qkv_OH, layer.output_HO, layer.gate_up_GH, layer.down_HF, weights.head_VH)
        ops = reference_ops()
        if batch_invariant:
            ops = batch_invariant_ops(matrices, config.num_kv_heads, config.head_dim)
        self.decoder = Decoder(config, weights, ops, max_model_len=LENGTH)
        self._shape = (config.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE)
        self._shape += (config.num_kv_heads, config.head_dim)  # type: ignore[assignment]

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], steps: Sequence[Sequence[Share]]) -> Tensor:
        """Hidden states, then logits, of request 0, [its tokens, 2H + V]."""
        order = torch.randperm(NUM_BLOCKS).tolist()
        tables = [[order.pop() for _ in range(-(-len(p) // BLOCK_SIZE))] for p in prompts]
        requests = [
            Request(str(i), 0, prompt, SamplingParams(), StoppingCriteria(max_tokens=1))
            for i, prompt in enumerate(prompts)
        ]
        kv_cache = torch.full(self._shape, float("nan"))
        rows = []
        for step in steps:
            scheduled = [
                ScheduledRequest(requests[r], first, count, tables[r]) for r, first, count in step
            ]
            batch = build_input_batch(scheduled, BLOCK_SIZE, torch.device("cpu"))
            hidden = self.decoder.forward(batch, kv_cache)
            logits_TV = self.decoder.logits(hidden, torch.arange(len(hidden.x_TH)))
            all_T = torch.cat((hidden.x_TH, hidden.residual_TH, logits_TV), dim=-1)
            start = 0
            for r, _, count in step:
                if r == 0:
                    rows.append(all_T[start : start + count])
                start += count
        return torch.cat(rows)


def tokens(seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(20, 49_000, (length,), generator=generator).tolist()


PROMPTS = [tokens(0, LENGTH), tokens(1, 90), tokens(2, 33), tokens(3, 140), tokens(4, 1)]


def cut(counts: Sequence[int]) -> list[list[Share]]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [[(0, start, count)] for start, count in zip(starts, counts, strict=True)]


WHOLE = cut([LENGTH])
COMPOSITIONS: dict[str, list[list[Share]]] = {
    "one by one": cut([1] * LENGTH),
    "chunks within blocks": cut([5, 3, 16, 1, 100, 1, 24]),
    "last token alone": cut([LENGTH - 1, 1]),
    "first of many": [[(0, 0, LENGTH), (1, 0, 90), (2, 0, 33)]],
    "last of many": [[(4, 0, 1), (3, 0, 140), (1, 0, 90), (0, 0, LENGTH)]],
    "chunks among chunks": [
        [(3, 0, 20), (0, 0, 7), (1, 0, 1)],
        [(0, 7, 60), (1, 1, 30), (4, 0, 1)],
        [(1, 31, 1), (2, 0, 33), (0, 67, 1), (3, 20, 120)],
        [(0, 68, 82)],
    ],
}

ARCHITECTURES = {
    "llama": ("llama", {"num_hidden_layers": 2}),
    "mistral-window": ("mistral", {"sliding_window": 20, "num_hidden_layers": 2}),
    "qwen2-odd-sizes": ("qwen2", {"intermediate_size": 333, "num_hidden_layers": 2}),
    "qwen3": ("qwen3", {"head_dim": 32, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model_dir(request: pytest.FixtureRequest, tiny_model_dir: MakeTinyModel) -> Path:
    arch, overrides = ARCHITECTURES[request.param]
    return tiny_model_dir(arch, **overrides)


def test_every_row_has_the_same_bits_in_any_composition(model_dir: Path) -> None:
    model = Model(model_dir, batch_invariant=True)
    expected = model.run(PROMPTS, WHOLE)
    assert expected.isfinite().all()
    for name, steps in COMPOSITIONS.items():
        assert torch.equal(model.run(PROMPTS, steps), expected), name


def test_the_plain_ops_give_the_same_numbers_but_not_the_same_bits(model_dir: Path) -> None:
    plain = Model(model_dir, batch_invariant=False)
    expected = Model(model_dir, batch_invariant=True).run(PROMPTS, WHOLE)
    results = [plain.run(PROMPTS, steps) for steps in COMPOSITIONS.values()]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
    assert not all(torch.equal(result, results[0]) for result in results)


def test_the_embedded_model_too(embedded_model_dir: Path) -> None:
    model = Model(embedded_model_dir, batch_invariant=True)
    expected = model.run(PROMPTS, WHOLE)
    for name in ("chunks within blocks", "last of many", "chunks among chunks"):
        assert torch.equal(model.run(PROMPTS, COMPOSITIONS[name]), expected), name
