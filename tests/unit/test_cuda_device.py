"""What a GPU can compute, told from its compute capability; and what is said if it can't."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine_service.config import ModelConfig
from engine_service.cuda_device import dtype_for, kernels_for
from engine_service.decoder_loader import pick_kernels
from engine_service.model_error import ModelError
from tests.pretend_gpu import PretendGpu

TURING, AMPERE, HOPPER = (7, 5), (8, 0), (9, 0)


def test_triton_compiles_for_ampere_and_later() -> None:
    assert kernels_for(TURING) == ("reference",)
    assert kernels_for(AMPERE) == kernels_for(HOPPER) == ("triton", "reference")


def test_auto_dtype_is_one_that_matrix_units_take() -> None:
    for checkpoint_dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert dtype_for(TURING, checkpoint_dtype) == torch.float16
    assert dtype_for(AMPERE, torch.float32) == torch.bfloat16
    assert dtype_for(AMPERE, torch.bfloat16) == torch.bfloat16
    assert dtype_for(AMPERE, torch.float16) == torch.float16


def test_float8_is_refused_where_matrix_units_do_not_take_it(tmp_path: Path) -> None:
    config = ModelConfig(str(tmp_path), "tiny", quantization="fp8")
    gpu = PretendGpu()
    assert pick_kernels(config, gpu, torch.bfloat16) == "triton"
    gpu.takes_float8 = False
    with pytest.raises(ModelError, match="fp8 needs a GPU of compute"):
        pick_kernels(config, gpu, torch.bfloat16)


def test_kernels_that_can_not_be_compiled_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def no_compiler(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr("kernels.triton.activation.silu_mul", no_compiler)
    with caplog.at_level(logging.WARNING):
        config = ModelConfig(str(tmp_path), "tiny")
        assert pick_kernels(config, PretendGpu(), torch.bfloat16) == "reference"
    assert "Failed to find C compiler" in caplog.text
    asked = ModelConfig(str(tmp_path), "tiny", kernels="triton")
    with pytest.raises(ModelError, match="Failed to find C compiler"):
        pick_kernels(asked, PretendGpu(), torch.bfloat16)
