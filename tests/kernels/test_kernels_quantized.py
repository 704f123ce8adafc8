"""The reference of quantized products against dense mathematics in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernels.reference.quantized import (
    GROUP,
    Quantization,
    dequantize,
    quantize_matrix,
    quantize_rows,
    quantized_embed,
    quantized_linear,
    quantized_logits_head,
)

QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("num_inputs", [1, 31, 32, 33, 100])
@pytest.mark.parametrize(("quantization", "num_steps"), [("int8", 254), ("int4", 15)])
def test_a_weight_is_at_most_half_a_step_off(
    quantization: Quantization, num_steps: int, num_inputs: int
) -> None:
    weight_OI = torch.randn(20, num_inputs)
    error_OI = (dequantize(quantize_matrix(weight_OI, quantization)) - weight_OI).abs()
    for first in range(0, num_inputs, GROUP):
        group_OI = weight_OI[:, first : first + GROUP]
        if quantization == "int8":
            span_O1 = 2 * group_OI.abs().amax(dim=1, keepdim=True)
        else:
            span_O1 = group_OI.amax(dim=1, keepdim=True) - group_OI.amin(dim=1, keepdim=True)
        # Scales and offsets are rounded to 11 bits.
        rounding_O1 = 2**-10 * group_OI.abs().amax(dim=1, keepdim=True)
        bound_O1 = span_O1 / num_steps / 2 + rounding_O1
        assert (error_OI[:, first : first + GROUP] <= bound_O1).all()


@pytest.mark.parametrize(("quantization", "largest"), [("int4", 127), ("int8", 32767)])
def test_rows_are_scaled_to_all_that_there_is(quantization: Quantization, largest: int) -> None:
    x_TI = torch.randn(9, 70) * torch.logspace(-3, 3, 9).unsqueeze(1)
    quants_TGI, scales_TG = quantize_rows(x_TI, quantization)
    assert quants_TGI.shape == (9, 3, GROUP) and scales_TG.shape == (9, 3)
    assert (quants_TGI.abs().amax(dim=-1) == largest).all()
    assert torch.equal(quants_TGI, quants_TGI.round())
    restored_TI = (quants_TGI * scales_TG.unsqueeze(-1)).flatten(1)
    error_TI = F.pad(x_TI, (0, 26)) - restored_TI
    assert (error_TI.view(9, 3, GROUP).abs() <= 0.5001 * scales_TG.unsqueeze(-1)).all()


def test_a_group_with_a_number_far_larger_than_the_others_has_more_bits() -> None:
    x_TI = torch.randn(3, 576)
    x_TI[1, 40] = 100.0
    quants_TGI, scales_TG = quantize_rows(x_TI, "int4")
    largest_TG = quants_TGI.abs().amax(dim=-1)
    assert largest_TG[1, 1] == 32639
    largest_TG[1, 1] = 127
    assert (largest_TG == 127).all()
    error_I = quants_TGI[1, 1] * scales_TG[1, 1] - x_TI[1, 32:64]
    assert error_I.abs().max() < 0.002


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("num_inputs", [1, 33, 576])
def test_products_are_those_of_the_quantized_numbers(
    quantization: Quantization, num_inputs: int
) -> None:
    weight_OI, x_TI, bias_O = (
        torch.randn(20, num_inputs),
        torch.randn(5, num_inputs),
        torch.ones(20),
    )
    matrix = quantize_matrix(weight_OI, quantization)
    quants_TGI, scales_TG = quantize_rows(x_TI, quantization)
    seen_x_TI = (quants_TGI.double() * scales_TG.double().unsqueeze(-1)).flatten(1)[:, :num_inputs]
    want_TO = seen_x_TI @ dequantize(matrix).double().T
    got_TO = quantized_linear(x_TI, matrix, bias_O)
    torch.testing.assert_close(got_TO.double(), want_TO + 1.0, rtol=1e-5, atol=1e-5)
    exact_TO = x_TI.double() @ weight_OI.double().T
    relative_error = (want_TO - exact_TO).norm() / exact_TO.norm()
    assert relative_error < (0.015 if quantization == "int8" else 0.12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_keep_the_rows_dtype_but_logits_are_float32(dtype: torch.dtype) -> None:
    matrix, x_TI = quantize_matrix(torch.randn(6, 40), "int8"), torch.randn(3, 40).to(dtype)
    logits_TO = quantized_logits_head(x_TI, matrix)
    assert logits_TO.dtype == torch.float32
    got_TO = quantized_linear(x_TI, matrix, torch.zeros(6, dtype=dtype))
    assert got_TO.dtype == dtype
    assert torch.equal(got_TO, logits_TO.to(dtype))


def test_no_rows_give_no_rows() -> None:
    assert quantized_linear(
        torch.empty(0, 40), quantize_matrix(torch.ones(6, 40), "int4"), None
    ).shape == (0, 6)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_what_is_not_finite_fails_its_own_row(quantization: Quantization) -> None:
    matrix, x_TI = quantize_matrix(torch.randn(6, 70), quantization), torch.randn(4, 70)
    want_TO = quantized_linear(x_TI, matrix, None)
    x_TI[1, 40], x_TI[3, 0] = float("inf"), float("nan")
    got_TO = quantized_linear(x_TI, matrix, None)
    assert got_TO[[1, 3]].isnan().all()
    assert torch.equal(got_TO[[0, 2]], want_TO[[0, 2]])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_embedding_of_a_tied_head_is_the_matrix_that_products_see(
    quantization: Quantization,
) -> None:
    table_VH, ids_T = torch.randn(10, 40), torch.tensor([3, 9, 3, 0])
    assert torch.equal(quantized_embed(ids_T, table_VH), table_VH[ids_T])
    matrix = quantize_matrix(table_VH, quantization)
    assert torch.equal(quantized_embed(ids_T, matrix), dequantize(matrix)[ids_T])


def test_what_has_no_quantized_form_is_refused() -> None:
    with pytest.raises(ValueError, match="not int8 or int4"):
        quantize_matrix(torch.ones(2, 2), "none")
    for bad in (float("nan"), float("inf"), 1e5):
        with pytest.raises(ValueError, match="weights from"):
            quantize_matrix(torch.tensor([[1.0, bad]]), "int8")
