"""Matrix products in Triton: with matrices of the rows' dtype, in int8, int4 and float8."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from kernels.reference.quantized import Quantization, dequantize, quantize_matrix
from kernels.triton.fp8 import (
    fp8_embed,
    fp8_linear,
    fp8_logits_head,
    quantize_fp8,
    quantize_rows,
)
from kernels.triton.linear import linear, logits_head
from kernels.triton.linear_tiles import LinearTiles
from kernels.triton.quantized import IntMatrix, QuantizedProducts, int_embed, widen

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Of the norm. A weight's rounding to the rows' dtype, and the result's; in the interpreter, which
# cuts bfloat16 off, twice as much.
TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")
SHAPES = [(1, 7, 9), (5, 100, 333), (70, 40, 64)]  # T, O, I


@pytest.fixture(autouse=True)
def _tensors_on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        torch.manual_seed(3)
        yield


def assert_close(got: Tensor, want_double: Tensor, tolerance: float) -> None:
    assert (got.double() - want_double).norm() <= tolerance * want_double.norm()


@pytest.mark.parametrize(
    ("num_outputs", "outputs"),
    [(1, 32), (8191, 32), (8192, 64), (16383, 64), (16384, 128), (152064, 128)],
)
def test_tiles_are_as_wide_as_leaves_enough_programs(num_outputs: int, outputs: int) -> None:
    tiles = LinearTiles.of(num_outputs)
    assert tiles.outputs == outputs
    assert tiles.grid(65, num_outputs) == (2, -(-num_outputs // outputs))
    assert tiles.grid(0, num_outputs)[0] == 0


@pytest.mark.parametrize(
    ("num_outputs", "shared_kib", "stages"),
    [(4096, 228, 6), (8192, 228, 6), (28672, 228, 4), (4096, 100, 3), (28672, 100, 3), (9, 40, 1)],
)
def test_as_much_is_read_ahead_as_fits(
    num_outputs: int, shared_kib: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kernels.triton.linear_tiles._shared_bytes", lambda device: shared_kib * 1024
    )
    tiles = LinearTiles.of(num_outputs)
    cpu = torch.device("cpu")
    assert tiles.num_stages(tiles.input_bytes, tiles.input_bytes, cpu) == stages


def test_what_is_widened_leaves_less_to_read_ahead() -> None:
    narrow, wide, cpu = LinearTiles.of(4096), LinearTiles.of(28_672), torch.device("cpu")
    row_bytes = 256  # 128 inputs, in 16 bits
    for output_bytes, stages in ((136, 2), (80, 3)):  # in int8, in int4, with scales
        assert narrow.num_stages(row_bytes, output_bytes, cpu, row_bytes) == 6
        assert wide.num_stages(row_bytes, output_bytes, cpu, row_bytes) == stages


# ---------------------------------------------------------------- the rows' dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_linear(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    x, bias = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    weight = torch.randn(num_outputs, num_inputs).to(dtype)
    want = x.double() @ weight.double().T
    got = linear(x, weight, bias)
    assert got.dtype == dtype
    assert_close(got, want + bias.double(), TOLERANCES[dtype])
    logits = logits_head(x, weight)
    assert logits.dtype == torch.float32
    assert_close(logits, want, TOLERANCES[torch.float32])


@pytest.mark.slow
def test_products_of_wide_tiles() -> None:
    for num_outputs in (8200, 16400):
        x, weight = torch.randn(3, 200).half(), torch.randn(num_outputs, 200).half()
        want = x.double() @ weight.double().T
        assert_close(linear(x, weight, None), want, 1e-3)
        for quantization in QUANTIZATIONS:
            quantized = quantize_matrix(weight, quantization)
            want = x.double() @ dequantize(quantized).double().T
            got = QuantizedProducts(True).linear(x, IntMatrix.of(quantized), None)
            assert_close(got, want, 1e-3)


def test_rows_may_lie_apart() -> None:
    x, weight = torch.randn(6, 50), torch.randn(20, 30)
    assert torch.equal(linear(x[:, 10:40], weight, None), linear(x[:, 10:40].clone(), weight, None))
    with pytest.raises(ValueError, match="the rows of x have gaps"):
        linear(x[:, ::2], weight[:, :25].contiguous(), None)
    with pytest.raises(ValueError, match="the matrix has gaps"):
        linear(x[:, :25], weight[:, :25], None)
    with pytest.raises(ValueError, match="rows of 50"):
        linear(x, weight, None)


# ---------------------------------------------------------------- int8, int4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_quantized_products(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    quantization: Quantization,
    dtype: torch.dtype,
) -> None:
    x, bias = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    matrix = quantize_matrix(torch.randn(num_outputs, num_inputs), quantization)
    want = x.double() @ dequantize(matrix).double().T
    products, stored = QuantizedProducts(batch_invariant=False), IntMatrix.of(matrix)
    got = products.linear(x, stored, bias)
    assert got.dtype == dtype
    assert_close(got, want + bias.double(), TOLERANCES[dtype])
    logits = products.logits_head(x, stored)
    assert logits.dtype == torch.float32
    assert_close(logits, want, TOLERANCES[dtype])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_many_rows_are_the_librarys_unless_bits_matter(quantization: Quantization) -> None:
    x = torch.randn(600, 70)
    matrix, bias = quantize_matrix(torch.randn(9, 70), quantization), torch.randn(9)
    want, stored = x.double() @ dequantize(matrix).double().T + bias.double(), IntMatrix.of(matrix)
    assert_close(QuantizedProducts(batch_invariant=False).linear(x, stored, bias), want, 1e-6)
    whole = QuantizedProducts(batch_invariant=True).linear(x, stored, bias)
    assert_close(whole, want, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (33, 129), (5, 300)])
def test_a_widened_matrix_is_what_the_quantized_one_stands_for(
    num_outputs: int, num_inputs: int, quantization: Quantization, dtype: torch.dtype
) -> None:
    matrix = quantize_matrix(torch.randn(num_outputs, num_inputs), quantization)
    got, want = widen(IntMatrix.of(matrix), dtype), dequantize(matrix)
    assert got.is_contiguous() and got.dtype == dtype
    if dtype == torch.bfloat16:  # which the interpreter cuts off
        assert ((got.float() - want).abs() <= 2**-7 * want.abs()).all()
    else:
        assert torch.equal(got, want.to(dtype))


def test_the_embedded_models_blocks_are_recovered(
    embedded_model_dir: Path, device: torch.device
) -> None:
    with safe_open(embedded_model_dir / "model.safetensors", "pt") as file:
        weight = file.get_tensor("model.layers.3.mlp.down_proj.weight")[:64].to(device)
    assert torch.equal(widen(IntMatrix.of(quantize_matrix(weight, "int4")), torch.float32), weight)


def test_bytes_of_a_group() -> None:
    weight = torch.arange(96.0).view(2, 48) % 16
    int8, int4 = (IntMatrix.of(quantize_matrix(weight, q)) for q in QUANTIZATIONS)
    assert (int8.nbytes, int4.nbytes) == (4 * (32 + 2), 4 * (16 + 4))
    assert int4.values_OGB[0, 0, :8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert int4.values_OGB.is_contiguous()


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_embedding_of_a_quantized_head(quantization: Quantization) -> None:
    table, ids = torch.randn(10, 40), torch.tensor([3, 9, 3, 0])
    assert torch.equal(int_embed(ids, table), table[ids])
    matrix = quantize_matrix(table, quantization)
    assert torch.equal(int_embed(ids, IntMatrix.of(matrix)), dequantize(matrix)[ids])
    assert int_embed(ids[:0], IntMatrix.of(matrix)).shape == (0, 40)


def test_a_quantized_product_refuses_what_it_would_misread() -> None:
    matrix = IntMatrix.of(quantize_matrix(torch.randn(9, 70), "int8"))
    products = QuantizedProducts(batch_invariant=True)
    with pytest.raises(ValueError, match="rows of 96 for a matrix of 70 inputs"):
        products.linear(torch.randn(2, 96), matrix, None)
    gaps = replace(matrix, scales_OG=matrix.scales_OG[:, :1])
    with pytest.raises(ValueError, match="the scales has gaps"):
        products.linear(torch.randn(2, 70), gaps, None)


# ---------------------------------------------------------------- float8


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_in_float8(dtype: torch.dtype) -> None:
    x = (torch.randn(9, 333) * torch.logspace(-4, 2, 9).unsqueeze(1)).to(dtype)
    x[3] = 0.0
    values, scales = quantize_rows(x)
    want_scales = x.float().abs().amax(dim=1) / 448
    assert torch.allclose(scales[x.any(dim=1)], want_scales[x.any(dim=1)], rtol=1e-6, atol=0.0)
    want = (x.float() / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
    assert torch.equal(values.float(), want.float())


def test_every_number_becomes_the_nearest_of_float8() -> None:
    small, large = torch.logspace(-9, 0, 3000), torch.linspace(0.0, 448.0, 5191)
    x = torch.cat((small, large, -small, -large)).unsqueeze(0)  # its scale is 1
    ties = torch.tensor([1.0625, 1.1875, -1.1875, 2.0**-10, 3 * 2.0**-10, 432.0]).unsqueeze(0)
    x[0, : ties.shape[1]] = ties
    values, scales = quantize_rows(x)
    assert scales.item() == 1.0
    assert torch.equal(values.float(), x.to(torch.float8_e4m3fn).float())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_float8_products(
    num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype
) -> None:
    x, bias = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs).to(dtype)
    weight = torch.randn(num_outputs, num_inputs) * 3
    matrix = quantize_fp8(weight)
    values, scales = quantize_rows(x)
    dense = matrix.values_OI.float() * matrix.scales_O.unsqueeze(1)
    want = (values.double() * scales.double().unsqueeze(1)) @ dense.double().T
    got = fp8_linear(x, matrix, bias)
    assert got.dtype == dtype
    # A GPU adds products of float8 up in fewer bits than float32's.
    assert_close(got, want + bias.double(), max(TOLERANCES[dtype], 1e-3))
    logits = fp8_logits_head(x, matrix)
    assert logits.dtype == torch.float32
    assert_close(logits, want, 1e-3)
    assert_close(logits, x.double() @ weight.double().T, 0.1)
    with pytest.raises(ValueError, match="rows of"):
        fp8_linear(x[:, 1:], matrix, None)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_not_finite_fails_its_own_row_in_float8() -> None:
    matrix, x = quantize_fp8(torch.randn(6, 70)), torch.randn(4, 70)
    want = fp8_linear(x, matrix, None)
    x[1, 40], x[3, 0] = float("inf"), float("nan")
    got = fp8_linear(x, matrix, None)
    assert got[[1, 3]].isnan().all()
    assert torch.equal(got[[0, 2]], want[[0, 2]])


def test_the_embedding_of_a_head_in_float8() -> None:
    table, ids = torch.randn(10, 40), torch.tensor([3, 9, 3, 0])
    assert torch.equal(fp8_embed(ids, table), table[ids])
    matrix = quantize_fp8(table)
    dense = matrix.values_OI.float() * matrix.scales_O.unsqueeze(1)
    assert torch.equal(fp8_embed(ids, matrix), dense[ids])
    assert_close(dense, table.double(), 0.05)


# ---------------------------------------------------------------- bits

Product = Callable[[Tensor], Tensor]


def products_of(weight: Tensor) -> dict[str, Product]:
    fp8 = quantize_fp8(weight)
    int8, int4 = (IntMatrix.of(quantize_matrix(weight, q)) for q in QUANTIZATIONS)
    quantized = QuantizedProducts(batch_invariant=True)
    return {
        "plain": lambda x: linear(x, weight, None),
        "head": lambda x: logits_head(x, weight),
        "int8": lambda x: quantized.linear(x, int8, None),
        "int4": lambda x: quantized.logits_head(x, int4),
        "fp8": lambda x: fp8_linear(x, fp8, None),
    }


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("name", ["plain", "head", "int8", "int4", "fp8"])
def test_a_row_has_the_same_bits_among_any_others(name: str) -> None:
    product = products_of(torch.randn(50, 150).half())[name]
    x = torch.randn(130, 150).half()
    whole = product(x)
    for start, end in ((0, 1), (63, 64), (129, 130), (5, 75)):
        assert torch.equal(product(x[start:end]), whole[start:end])
    assert product(x[:0]).shape == (0, 50)
