"""Packed products against the same mathematics in torch, in every form that this machine runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as dequantize_blocks
from gguf.quants import quantize as quantize_blocks
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from kernels.cpu.build import machine_forms
from kernels.cpu.library import FORM_VARIABLE, set_num_threads
from kernels.cpu.linear import (
    ALIGNMENT,
    PackedMatrix,
    Quantization,
    linear,
    logits_head,
    pack_matrix,
    packed_bytes,
    unpack_rows,
)
from kernels.reference.quantized import dequantize, quantize_matrix, quantized_linear

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8", "int4")
NUM_ROWS = (0, 1, 2, 3, 5, 8, 33, 129)
# Outputs come in tiles of 16, inputs in groups of 32.
SHAPES = [
    *((num_outputs, num_inputs) for num_outputs in (1, 7, 16, 17) for num_inputs in (1, 31, 32)),
    (17, 33),
    (100, 576),
    (48, 1536),
]


@pytest.fixture(params=machine_forms(), autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    form: str = request.param
    monkeypatch.setenv(FORM_VARIABLE, form)
    torch.manual_seed(11)
    return form


@pytest.fixture
def restored_num_threads() -> Iterator[None]:
    yield
    set_num_threads(1)


def _with_outliers(x_TI: Tensor) -> Tensor:
    """Some numbers are far larger than their row's others, as some activations are."""
    return torch.where(torch.rand(x_TI.shape) < 0.01, 30.0 * x_TI, x_TI)


def _expected(x_TI: Tensor, weight_OI: Tensor, quantization: Quantization) -> Tensor:
    if quantization == "none":
        return (x_TI.double() @ weight_OI.double().T).float()
    return quantized_linear(x_TI, quantize_matrix(weight_OI, quantization), None)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_products_are_the_references(
    num_outputs: int, num_inputs: int, quantization: Quantization
) -> None:
    weight_OI = torch.randn(num_outputs, num_inputs)
    bias_O = torch.randn(num_outputs)
    matrix = pack_matrix(weight_OI, quantization)
    for num_rows in NUM_ROWS:
        x_TI = _with_outliers(torch.randn(num_rows, num_inputs))
        want_TO = _expected(x_TI, weight_OI, quantization)
        # An integer that is off by one shows as 1e-3 at least.
        torch.testing.assert_close(linear(x_TI, matrix, None), want_TO, rtol=1e-5, atol=3e-4)
        got_TO = linear(x_TI, matrix, bias_O)
        torch.testing.assert_close(got_TO, want_TO + bias_O, rtol=1e-5, atol=3e-4)
        assert torch.equal(logits_head(x_TI, matrix), linear(x_TI, matrix, None))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_whole_vocabulary(quantization: Quantization) -> None:
    weight_OI, x_TI = torch.randn(49152, 33), torch.randn(2, 33)
    got_TO = linear(x_TI, pack_matrix(weight_OI, quantization), None)
    want_TO = _expected(x_TI, weight_OI, quantization)
    torch.testing.assert_close(got_TO, want_TO, rtol=1e-5, atol=1e-4)


@settings(max_examples=40)
@given(
    quantization=st.sampled_from(("int8", "int4")),
    num_outputs=st.integers(1, 40),
    num_groups=st.integers(1, 4),
    num_rows=st.integers(1, 20),
    seed=st.integers(0, 2**31),
)
def test_products_of_integers_are_exact(
    quantization: Quantization, num_outputs: int, num_groups: int, num_rows: int, seed: int
) -> None:
    """Rows and matrices of integers whose scales are 1: only sums of groups are rounded."""
    generator = torch.Generator().manual_seed(seed)

    def integers(rows: int, lowest: int, highest: int) -> Tensor:
        """The bounds are in every group, which makes its scale 1 and its offset the lowest."""
        shape = (rows, num_groups, 32)
        values = torch.randint(lowest, highest + 1, shape, generator=generator)
        if torch.rand(1, generator=generator) < 0.3:
            values[:] = highest  # the largest sums that there are
        values[..., 0], values[..., 1] = lowest, highest
        return values.flatten(1)

    largest = 127 if quantization == "int4" else 32767
    x_TI = integers(num_rows, -largest, largest)
    lowest = int(torch.randint(-20, 20, (1,), generator=generator))
    bounds = (lowest, lowest + 15) if quantization == "int4" else (-127, 127)
    weight_OI = integers(num_outputs, *bounds)
    got_TO = linear(x_TI.float(), pack_matrix(weight_OI.float(), quantization), None)
    expected_TO = torch.zeros(num_rows, num_outputs)
    offset = float(lowest) if quantization == "int4" else 0.0
    for x_TJ, weight_OJ in zip(
        torch.split(x_TI, 32, dim=1), torch.split(weight_OI, 32, dim=1), strict=True
    ):
        # Each addition is rounded once; what is added is exact but for the dot product itself.
        dots_TO = (x_TJ @ (weight_OJ - int(offset)).T).float()
        expected_TO = (expected_TO.double() + dots_TO.double()).float()
        sums_T1 = x_TJ.sum(dim=1, keepdim=True).float()
        expected_TO = (expected_TO.double() + offset * sums_T1.double()).float()
    assert torch.equal(got_TO, expected_TO)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(7, 33), (100, 576)])
@pytest.mark.usefixtures("restored_num_threads")
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(
    num_outputs: int, num_inputs: int, quantization: Quantization
) -> None:
    matrix = pack_matrix(torch.randn(num_outputs, num_inputs), quantization)
    bias_O = torch.randn(num_outputs)
    x_TI = _with_outliers(torch.randn(300, num_inputs))
    set_num_threads(1)
    alone_TO = torch.cat([linear(x_TI[row : row + 1], matrix, bias_O) for row in range(300)])
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        for num_rows in (*range(1, 14), 33, 127, 128, 129, 257, 300):
            start = 300 - num_rows  # every row is at another place each time
            got_TO = linear(x_TI[start:], matrix, bias_O)
            assert torch.equal(got_TO, alone_TO[start:]), (num_threads, num_rows)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_avx512_has_the_bits_of_avx2(
    form: str, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    if form != "avx512":
        pytest.skip("compares the two")
    weight_OI, x_TI = torch.randn(50, 600), _with_outliers(torch.randn(37, 600))
    got_TO = linear(x_TI, pack_matrix(weight_OI, quantization), None)
    monkeypatch.setenv(FORM_VARIABLE, "avx2")
    assert torch.equal(got_TO, linear(x_TI, pack_matrix(weight_OI, quantization), None))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_is_not_finite_fails_its_own_row(quantization: Quantization) -> None:
    matrix = pack_matrix(torch.randn(20, 70), quantization)
    x_TI = torch.randn(12, 70)
    want_TO = linear(x_TI, matrix, None)
    x_TI[1, 5], x_TI[4, 69], x_TI[7, 33] = float("nan"), float("inf"), float("-inf")
    got_TO = linear(x_TI, matrix, None)
    bad = torch.tensor([1, 4, 7])
    good = torch.tensor([row for row in range(12) if row not in bad.tolist()])
    assert torch.equal(got_TO[good], want_TO[good])
    assert not got_TO[bad].isfinite().any()
    if quantization != "none":
        assert got_TO[bad].isnan().all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("magnitude", [0.0, 1e-44, 1e-38, 1e-30, 1e-20, 1e30])
def test_rows_of_any_magnitude(magnitude: float, quantization: Quantization) -> None:
    weight_OI = torch.randn(20, 70)
    matrix = pack_matrix(weight_OI, quantization)
    x_TI = torch.randn(3, 70)
    x_TI[1] *= magnitude
    x_TI[2, 32:64] *= magnitude
    got_TO = linear(x_TI, matrix, None)
    want_TO = _expected(x_TI, weight_OI, quantization)
    assert got_TO.isfinite().all()
    smallest = max(1e-4 * magnitude, 1e-40)  # below it numbers lose their bits
    torch.testing.assert_close(got_TO[1], want_TO[1], rtol=1e-5, atol=smallest)
    torch.testing.assert_close(got_TO[2], want_TO[2], rtol=1e-5, atol=1e-4 * max(1.0, magnitude))


def test_rows_may_be_strided() -> None:
    matrix = pack_matrix(torch.randn(20, 40), "int4")
    wide_TI, wide_TO = torch.randn(9, 100), torch.full((9, 50), 7.0)
    x_TI, out_TO = wide_TI[:, 30:70], wide_TO[:, 3:23]
    got_TO = linear(x_TI, matrix, None, out_TO)
    assert got_TO is out_TO
    assert torch.equal(out_TO, linear(x_TI.contiguous(), matrix, None))
    assert (wide_TO[:, :3] == 7.0).all()
    assert (wide_TO[:, 23:] == 7.0).all()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_rows_unpack_to_what_the_reference_has(
    num_outputs: int, num_inputs: int, quantization: Quantization
) -> None:
    weight_OI = torch.randn(num_outputs, num_inputs)
    weight_OI[0] = 0.25  # a group without any spread
    seen_OI = (
        weight_OI
        if quantization == "none"
        else dequantize(quantize_matrix(weight_OI, quantization))
    )
    rows_R = torch.randint(num_outputs, (9,))
    matrix = pack_matrix(weight_OI, quantization)
    assert torch.equal(unpack_rows(matrix, rows_R), seen_OI[rows_R])
    assert unpack_rows(matrix, rows_R[:0]).shape == (0, num_inputs)
    for missing in (-1, num_outputs):
        with pytest.raises(IndexError):
            unpack_rows(matrix, torch.tensor([0, missing]))


@pytest.mark.parametrize(
    ("quantization", "block_type"),
    [("int4", GGMLQuantizationType.Q4_1), ("int8", GGMLQuantizationType.Q8_0)],
)
def test_blocks_of_a_gguf_are_recovered(
    quantization: Quantization, block_type: GGMLQuantizationType
) -> None:
    numbers = (np.random.default_rng(5).standard_normal((40, 256)) * 0.05).astype(np.float32)
    blocks = quantize_blocks(numbers, block_type)
    weight_OI = torch.from_numpy(dequantize_blocks(blocks, block_type).astype(np.float32))
    matrix = pack_matrix(weight_OI, quantization)
    assert torch.equal(unpack_rows(matrix, torch.arange(40)), weight_OI)


def test_the_embedded_models_blocks_are_recovered(embedded_model_dir: Path) -> None:
    with safe_open(embedded_model_dir / "model.safetensors", "pt") as file:
        projection_OI = file.get_tensor("model.layers.3.mlp.down_proj.weight")
        head_VH = file.get_tensor("model.embed_tokens.weight")[:2000]
    cases: list[tuple[Tensor, Quantization]] = [(projection_OI, "int4"), (head_VH, "int8")]
    for weight, quantization in cases:
        matrix = pack_matrix(weight, quantization)
        assert torch.equal(unpack_rows(matrix, torch.arange(len(weight))), weight)


def test_a_mapped_file_is_used_in_place(tmp_path: Path) -> None:
    matrix, x_TI = pack_matrix(torch.randn(20, 70), "int4"), torch.randn(2, 70)
    path = tmp_path / "packed"
    path.write_bytes(bytes(ALIGNMENT) + matrix.data.numpy().tobytes())
    mapped = torch.from_numpy(np.memmap(path, np.uint8, mode="c"))[ALIGNMENT:]
    view = PackedMatrix("int4", 20, 70, mapped)
    assert view.data.data_ptr() == mapped.data_ptr()
    assert torch.equal(linear(x_TI, view, None), linear(x_TI, matrix, None))


def test_packed_sizes() -> None:
    """Of tiles of 16 outputs and groups of 32 inputs, the last ones filled up."""
    assert packed_bytes(17, 33, "none") == 2 * 33 * 16 * 4
    assert packed_bytes(17, 33, "int8") == 2 * 2 * 16 * (32 + 2)
    assert packed_bytes(17, 33, "int4") == 2 * 2 * 16 * (16 + 2 + 2)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_bad_arguments_are_refused(quantization: Quantization) -> None:
    matrix = pack_matrix(torch.randn(20, 70), quantization)
    x_TI, bias_O = torch.randn(3, 70), torch.randn(20)
    for x in (x_TI.double(), x_TI.half()):
        with pytest.raises(TypeError, match="x is"):
            linear(x, matrix, None)
    for x in (x_TI[:, :69], x_TI[0], torch.randn(70, 3).T):
        with pytest.raises(ValueError, match="x"):
            linear(x, matrix, None)
    with pytest.raises(TypeError, match="bias"):
        linear(x_TI, matrix, bias_O.double())
    for bias in (bias_O[:19], torch.randn(40)[::2]):
        with pytest.raises(ValueError, match="bias"):
            linear(x_TI, matrix, bias)
    for out in (torch.empty(2, 20), torch.empty(3, 21), torch.empty(1, 20).expand(3, 20)):
        with pytest.raises(ValueError, match="out"):
            linear(x_TI, matrix, None, out)
    with pytest.raises(TypeError, match="out"):
        linear(x_TI, matrix, None, torch.empty(3, 20, dtype=torch.float64))
    with pytest.raises(ValueError, match="dimension"):
        unpack_rows(matrix, torch.tensor([[1]]))


def test_bad_matrices_are_refused() -> None:
    data = pack_matrix(torch.randn(20, 70), "int8").data
    with pytest.raises(TypeError):
        PackedMatrix("int8", 20, 70, data.view(torch.int8))
    with pytest.raises(ValueError, match="bytes"):
        PackedMatrix("int8", 20, 70, data[1:])
    with pytest.raises(ValueError, match="aligned"):
        PackedMatrix("int8", 20, 70, torch.cat((data[:1], data))[1:])
    with pytest.raises(ValueError, match="two dimensions"):
        pack_matrix(torch.randn(5), "int8")
    for empty in (torch.empty(0, 5), torch.empty(5, 0)):
        with pytest.raises(ValueError, match="no int8 form"):
            pack_matrix(empty, "int8")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1e5])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_weights_beyond_half_precision_are_refused(quantization: Quantization, bad: float) -> None:
    weight_OI = torch.randn(3, 40)
    weight_OI[1, 35] = bad
    with pytest.raises(ValueError, match="weights from"):
        pack_matrix(weight_OI, quantization)
    pack_matrix(weight_OI, "none")
