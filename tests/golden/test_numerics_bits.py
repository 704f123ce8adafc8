"""Hidden states and logits, bit by bit: alone or among others, in one chunk or in many.

With the CPU kernels and with the reference's batch-invariant ops a token's row follows from the
tokens before it alone; with the reference's plain ones it does not, which is what makes the rest
worth something. And the fused decoder's bits are those of its ops, one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_service.cpu_device import CpuDevice
from engine_service.input_batch import build_input_batch
from engine_service.messages import SamplingParams, StoppingCriteria
from engine_service.model_loader import Checkpoint
from engine_service.models.config import read_config
from engine_service.models.decoder import Decoder, StepDecoder
from engine_service.models.fused_decoder import FusedDecoder
from engine_service.models.weights import load_weights, matrix_specs
from engine_service.packed_weights import pack_in_memory
from engine_service.request import Request
from engine_service.scheduler_output import ScheduledRequest
from kernels.cpu.linear import Quantization
from kernels.ops import batch_invariant_ops, cpu_ops, reference_ops
from tests.conftest import MakeTinyModel

BLOCK_SIZE, NUM_BLOCKS = 16, 64
LENGTH = 150  # of the request that is looked at

Share = tuple[int, int, int]  # request, first token, number of tokens


def reference_decoder(model_dir: Path, batch_invariant: bool) -> StepDecoder:
    config = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:

        def load(name: str) -> Tensor:
            return checkpoint.load(name, torch.float32, torch.device("cpu"))

        weights = load_weights(config, load, lambda spec: spec.load(load))
    layer = weights.layers[0]
    matrices = (layer.qkv_OH, layer.output_HO, layer.gate_up_GH, layer.down_HF, weights.head_VH)
    ops = reference_ops()
    if batch_invariant:
        ops = batch_invariant_ops(matrices, config.num_kv_heads, config.head_dim)
    return Decoder(config, weights, ops, max_model_len=LENGTH)


def cpu_decoder(model_dir: Path, quantization: Quantization, fused: bool) -> StepDecoder:
    config = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:

        def load(name: str) -> Tensor:
            return checkpoint.load(name, torch.float32, torch.device("cpu"))

        packed = pack_in_memory(matrix_specs(config), quantization, load)
        weights = load_weights(config, load, lambda spec: packed[spec.name])
        if fused:
            return FusedDecoder(config, weights, max_model_len=LENGTH)
        return Decoder(config, weights, cpu_ops(), max_model_len=LENGTH)


class Model:
    """A decoder and a pool of NaNs, given steps by hand; requests own blocks of a random order."""

    def __init__(
        self, model_dir: Path, decoder: StepDecoder, kv_dtype: torch.dtype = torch.float32
    ) -> None:
        config = read_config(model_dir)
        self.decoder = decoder
        self._kv_dtype = kv_dtype
        self._shape = (config.num_layers, 2, NUM_BLOCKS, BLOCK_SIZE)
        self._shape += (config.num_kv_heads, config.head_dim)  # type: ignore[assignment]

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], steps: Sequence[Sequence[Share]]) -> Tensor:
        """Hidden states, then logits, of request 0, [its tokens, H + V]."""
        order = torch.randperm(NUM_BLOCKS).tolist()
        tables = [[order.pop() for _ in range(-(-len(p) // BLOCK_SIZE))] for p in prompts]
        requests = [
            Request(str(i), 0, prompt, SamplingParams(), StoppingCriteria(max_tokens=1))
            for i, prompt in enumerate(prompts)
        ]
        kv_cache = torch.full(self._shape, float("nan"), dtype=self._kv_dtype)
        rows = []
        for step in steps:
            scheduled = [
                ScheduledRequest.of(requests[r], first, count, tables[r])
                for r, first, count in step
            ]
            batch = build_input_batch(scheduled, BLOCK_SIZE, CpuDevice())
            hidden_TH = self.decoder.forward(batch, kv_cache)
            all_T = torch.cat((hidden_TH, self.decoder.logits(hidden_TH)), dim=-1)
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


CPU_MODES: list[tuple[Quantization, torch.dtype]] = [
    ("none", torch.float32),
    ("none", torch.float16),
    ("int8", torch.float16),
    ("int4", torch.float16),
]


def check_same_bits(model: Model, names: Iterable[str] = COMPOSITIONS) -> None:
    expected = model.run(PROMPTS, WHOLE)
    assert expected.isfinite().all()
    for name in names:
        assert torch.equal(model.run(PROMPTS, COMPOSITIONS[name]), expected), name


def test_reference_rows_have_the_same_bits_in_any_composition(model_dir: Path) -> None:
    check_same_bits(Model(model_dir, reference_decoder(model_dir, batch_invariant=True)))


@pytest.mark.parametrize(("quantization", "kv_dtype"), CPU_MODES)
def test_cpu_rows_have_the_same_bits_in_any_composition(
    model_dir: Path, quantization: Quantization, kv_dtype: torch.dtype
) -> None:
    decoder = cpu_decoder(model_dir, quantization, fused=True)
    check_same_bits(Model(model_dir, decoder, kv_dtype))


@pytest.mark.parametrize(("quantization", "kv_dtype"), CPU_MODES)
def test_the_fused_decoder_has_the_bits_of_its_ops(
    model_dir: Path, quantization: Quantization, kv_dtype: torch.dtype
) -> None:
    fused, by_op = (cpu_decoder(model_dir, quantization, fused) for fused in (True, False))
    steps = COMPOSITIONS["chunks among chunks"]
    expected = Model(model_dir, by_op, kv_dtype).run(PROMPTS, steps)
    assert torch.equal(Model(model_dir, fused, kv_dtype).run(PROMPTS, steps), expected)


def test_the_cpu_kernels_numbers_are_those_of_the_reference(model_dir: Path) -> None:
    expected = Model(model_dir, reference_decoder(model_dir, False)).run(PROMPTS, WHOLE)
    result = Model(model_dir, cpu_decoder(model_dir, "none", fused=True)).run(PROMPTS, WHOLE)
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)


def test_the_plain_ops_give_the_same_numbers_but_not_the_same_bits(model_dir: Path) -> None:
    plain = Model(model_dir, reference_decoder(model_dir, batch_invariant=False))
    invariant = Model(model_dir, reference_decoder(model_dir, batch_invariant=True))
    expected = invariant.run(PROMPTS, WHOLE)
    results = [plain.run(PROMPTS, steps) for steps in COMPOSITIONS.values()]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-3)
    assert not all(torch.equal(result, results[0]) for result in results)


def test_the_embedded_model_too(embedded_model_dir: Path) -> None:
    some = ("chunks within blocks", "last of many", "chunks among chunks")
    reference = reference_decoder(embedded_model_dir, batch_invariant=True)
    check_same_bits(Model(embedded_model_dir, reference), some)
    for quantization, kv_dtype in CPU_MODES:
        decoder = cpu_decoder(embedded_model_dir, quantization, fused=True)
        check_same_bits(Model(embedded_model_dir, decoder, kv_dtype), some)
