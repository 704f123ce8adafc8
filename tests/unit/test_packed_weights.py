"""The packed file: made once, mapped from then on, made again when it is not whole."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine_service.config import ModelConfig
from engine_service.cpu_device import CpuDevice
from engine_service.decoder_loader import load_decoder, pick_kernels
from engine_service.model_error import ModelError
from engine_service.model_loader import Checkpoint
from engine_service.models.config import read_config
from engine_service.models.weights import HEAD, MatrixSpec
from engine_service.packed_weights import PackedWeightsCache, is_on_int4_grid, pack_in_memory
from kernels.cpu.build import KernelBuildError
from kernels.cpu.linear import Quantization
from kernels.reference.quantized import dequantize, quantize_matrix
from tests.conftest import MakeTinyModel

CPU = torch.device("cpu")


class Weights:
    """Random matrices by name; counts the loads."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.num_loads = 0
        self.specs = {
            HEAD: MatrixSpec(HEAD, 50, 40, ("head",)),
            "layers.0.qkv": MatrixSpec("layers.0.qkv", 24, 40, ("q", "k")),
            "layers.0.down": MatrixSpec("layers.0.down", 40, 70, ("down",)),
        }
        self._tensors = {
            "head": torch.randn(50, 40, generator=generator),
            "q": torch.randn(16, 40, generator=generator),
            "k": torch.randn(8, 40, generator=generator),
            "down": torch.randn(40, 70, generator=generator),
        }

    def load(self, name: str) -> Tensor:
        self.num_loads += 1
        return self._tensors[name]

    def cache(self, directory: Path, digest: str = "d") -> PackedWeightsCache:
        return PackedWeightsCache(directory, digest, self.specs, self.load)


@pytest.mark.parametrize("asked", ["int8", "int4"])
def test_a_second_engine_maps_what_the_first_packed(tmp_path: Path, asked: Quantization) -> None:
    weights = Weights()
    first = weights.cache(tmp_path).open(asked)
    assert weights.num_loads == 4
    second = weights.cache(tmp_path).open(asked)
    assert weights.num_loads == 4
    expected = pack_in_memory(weights.specs, asked, weights.load)
    for name, matrix in expected.items():
        assert matrix.quantization == ("int8" if name == HEAD else asked)
        for found in (first[name], second[name]):
            assert (found.quantization, found.num_outputs, found.num_inputs) == (
                matrix.quantization,
                matrix.num_outputs,
                matrix.num_inputs,
            )
            assert torch.equal(found.data, matrix.data)


def test_weights_that_were_made_from_four_bits_are_told_from_others() -> None:
    weights = Weights()
    assert not is_on_int4_grid(weights.specs, weights.load)
    rounded = {
        name: dequantize(quantize_matrix(weights.load(name), "int4")) for name in ("q", "k", "down")
    }
    assert is_on_int4_grid(weights.specs, rounded.__getitem__)  # the head is not looked at
    rounded["k"] = weights.load("k")
    assert not is_on_int4_grid(weights.specs, rounded.__getitem__)


def test_auto_is_int4_for_the_embedded_model(embedded_model_dir: Path) -> None:
    model = read_config(embedded_model_dir)
    with Checkpoint(embedded_model_dir) as checkpoint:
        loaded = load_decoder(
            model,
            checkpoint,
            lambda name: checkpoint.load(name, torch.float32, CPU),
            config(embedded_model_dir),
            kernels="cpu",
        )
    assert loaded.quantization == "int4"


def test_other_weights_have_another_file(tmp_path: Path) -> None:
    weights = Weights()
    weights.cache(tmp_path, "one").open("int8")
    weights.cache(tmp_path, "two").open("int8")
    assert weights.num_loads == 8


def test_a_file_that_is_not_whole_is_made_again(tmp_path: Path) -> None:
    weights = Weights()
    expected = weights.cache(tmp_path).open("int8")[HEAD].data.clone()
    (path,) = (path for path in tmp_path.iterdir() if not path.suffix)
    path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / f"{path.name}.partial").write_bytes(b"of a killed engine")
    assert torch.equal(weights.cache(tmp_path).open("int8")[HEAD].data, expected)
    assert weights.num_loads == 8


def test_without_a_place_for_the_file_they_are_packed_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = Weights()
    (tmp_path / "file").write_text("in the way of the directory")
    with caplog.at_level(logging.WARNING):
        found = weights.cache(tmp_path / "file").open("int8")
    assert found.keys() == weights.specs.keys()
    assert "packing the weights in memory" in caplog.text


# ---------------------------------------------------------------- which kernels


def config(model_dir: Path, **fields: str) -> ModelConfig:
    return ModelConfig(str(model_dir), "tiny", **fields)  # type: ignore[arg-type]


def test_without_a_compiler_auto_computes_by_the_reference(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def no_library() -> None:
        raise KernelBuildError("no compiler here")

    monkeypatch.setattr("engine_service.decoder_loader.library", no_library)
    with caplog.at_level(logging.WARNING):
        assert pick_kernels(config(tmp_path), CpuDevice(), torch.float32) == "reference"
    assert "no compiler here" in caplog.text
    with pytest.raises(ModelError, match="no compiler here"):
        pick_kernels(config(tmp_path, kernels="cpu"), CpuDevice(), torch.float32)


def test_the_cpu_kernels_compute_in_float32(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert pick_kernels(config(tmp_path), CpuDevice(), torch.bfloat16) == "reference"
    assert "the reference kernels compute, several times slower" in caplog.text
    with pytest.raises(ModelError, match="in float32 only"):
        pick_kernels(config(tmp_path, kernels="cpu"), CpuDevice(), torch.bfloat16)
    with pytest.raises(ModelError, match="'gpu' are not one of auto, cpu, triton, reference"):
        pick_kernels(config(tmp_path, kernels="gpu"), CpuDevice(), torch.float32)
    with pytest.raises(ModelError, match="triton kernels don't run on this cpu"):
        pick_kernels(config(tmp_path, kernels="triton"), CpuDevice(), torch.float32)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("quantization", ["auto", "none", "int8", "int4"])
def test_every_form_says_what_computes(
    kernels: str, quantization: str, tiny_model_dir: MakeTinyModel
) -> None:
    model_dir = tiny_model_dir("llama", num_hidden_layers=1)
    with Checkpoint(model_dir) as checkpoint:
        loaded = load_decoder(
            read_config(model_dir),
            checkpoint,
            lambda name: checkpoint.load(name, torch.float32, CPU),
            config(model_dir, quantization=quantization),
            kernels=kernels,
        )
    assert set(loaded.op_backends.values()) == {kernels}
    auto = "int8" if kernels == "cpu" else "none"
    assert loaded.quantization == (auto if quantization == "auto" else quantization)
    assert loaded.batch_invariant == (kernels == "cpu")


def test_weights_beyond_half_precision_are_a_model_error(
    tiny_model_dir: MakeTinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_service.decoder_loader.cache_dir", lambda: tmp_path)
    model_dir = tiny_model_dir("llama", num_hidden_layers=1)
    with (
        Checkpoint(model_dir) as checkpoint,
        pytest.raises(ModelError, match=r"can't be quantized: .*; quantization none can"),
    ):
        load_decoder(
            read_config(model_dir),
            checkpoint,
            lambda name: checkpoint.load(name, torch.float32, CPU) * 1e6,
            config(model_dir, quantization="int4"),
            kernels="cpu",
        )
