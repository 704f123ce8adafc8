"""Which kernels compute, in which form they get the weights, and the decoder made of both.

    device   kernels     weights                       decoder
    cpu      cpu         packed: float32, int8, int4   one fused call a step
             reference   tensors, or quantized ones    op by op
    cuda     triton      tensors, or quantized ones    op by op, replayed as a graph
             reference   tensors, or quantized ones    op by op

`auto` kernels are the device's best that can be had. With the cpu's, `auto` quantization is int4
for weights that have only four bits anyway, as those of the embedded model, and int8 for others,
which hardly differs from float32 (docs/performance.md). The others compute what they are given.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from engine_service.compute_device import ComputeDevice
from engine_service.config import ModelConfig
from engine_service.dummy_checkpoint import WeightSource
from engine_service.model_error import ModelError
from engine_service.model_store import cache_dir
from engine_service.models.config import DecoderConfig
from engine_service.models.decoder import Decoder, StepDecoder
from engine_service.models.fused_decoder import FusedDecoder
from engine_service.models.weights import (
    DecoderWeights,
    LoadTensor,
    MatrixSpec,
    load_weights,
    matrix_specs,
)
from engine_service.packed_weights import (
    PackedWeightsCache,
    is_on_int4_grid,
    pack_in_memory,
    quantization_of,
)
from kernels.cpu.build import KernelBuildError
from kernels.cpu.library import library
from kernels.cpu.linear import PackedMatrix, Quantization
from kernels.ops import (
    Ops,
    batch_invariant_ops,
    cpu_ops,
    fp8_triton_ops,
    op_backends,
    quantized_reference_ops,
    quantized_triton_ops,
    reference_ops,
    triton_ops,
)
from kernels.reference.quantized import QuantizedMatrix, quantize_matrix
from kernels.reference.row_tiles import NotBatchInvariant
from kernels.sampling_ops import (
    SamplingOps,
    cpu_sampling_ops,
    reference_sampling_ops,
    triton_sampling_ops,
)

_log = logging.getLogger(__name__)

KERNELS = ("auto", "cpu", "triton", "reference")
QUANTIZATIONS: Mapping[str, Quantization] = {"none": "none", "int8": "int8", "int4": "int4"}
_FP8 = "fp8"  # float8 weights and rows, with the triton kernels only

M = TypeVar("M")  # the kernels' form of a matrix


@dataclass(frozen=True, slots=True)
class LoadedDecoder:
    decoder: StepDecoder
    copy_blocks: Callable[[Tensor, Tensor, Tensor], None]
    op_backends: dict[str, str]
    quantization: str
    batch_invariant: bool


def pick_kernels(config: ModelConfig, device: ComputeDevice, dtype: torch.dtype) -> str:
    """cpu, triton or reference; compiles the cpu's. When it is not the device's best, the log says
    why. Raises ModelError when others were asked for than can compute."""
    if config.kernels not in KERNELS:
        raise ModelError(f"The kernels {config.kernels!r} are not one of {', '.join(KERNELS)}.")
    kernels = device.kernels[0] if config.kernels == "auto" else config.kernels
    if config.quantization == _FP8 and not device.takes_float8:
        raise ModelError("The quantization fp8 needs a GPU of compute capability 8.9 or more.")
    try:
        if kernels not in device.kernels:
            raise ModelError(f"The {kernels} kernels don't run on this {device.torch_device.type}.")
        if kernels == "cpu":
            _check_cpu_kernels(dtype)
        if kernels == "triton":
            _check_triton(device.torch_device)
    except ModelError as error:
        if config.kernels != "auto":
            raise
        _log.warning("the reference kernels compute, several times slower: %s", error)
        return "reference"
    return kernels


def _check_cpu_kernels(dtype: torch.dtype) -> None:
    if dtype != torch.float32:
        raise ModelError("The cpu kernels compute in float32 only.")
    try:
        library()
    except KernelBuildError as error:
        raise ModelError(str(error)) from error


def _check_triton(device: torch.device) -> None:
    """Compiles a small one and runs it: that takes a C compiler and Python's headers."""
    if importlib.util.find_spec("triton") is None:
        raise ModelError("The triton kernels need the package triton.")
    try:
        from kernels.triton.activation import silu_mul

        silu_mul(torch.zeros(1, 2, device=device))
    except Exception as error:  # whatever the compiler, the linker and the driver raise
        raise ModelError(f"The triton kernels can't be compiled here: {error}.") from error


def load_decoder(
    model: DecoderConfig,
    checkpoint: WeightSource,
    load: LoadTensor,
    config: ModelConfig,
    kernels: str,
) -> LoadedDecoder:
    """`load` gives the checkpoint's tensors in the decoder's dtype. Raises ModelError."""
    if config.quantization not in ("auto", *QUANTIZATIONS, _FP8):
        raise ModelError(
            f"The quantization {config.quantization!r} is not one of auto, "
            f"{', '.join((*QUANTIZATIONS, _FP8))}."
        )
    asked = QUANTIZATIONS.get(config.quantization)  # None: auto
    max_model_len = min(
        config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    )
    if config.quantization == _FP8:
        return _in_fp8(model, load, kernels, max_model_len)
    if kernels == "cpu":
        return _on_cpu_kernels(model, checkpoint, load, asked, max_model_len)
    if asked is None or asked == "none":
        return _op_by_op(model, load, kernels, config.batch_invariant, max_model_len)
    return _op_by_op_quantized(model, load, kernels, asked, config.batch_invariant, max_model_len)


def pick_sampling_ops(kernels: str) -> SamplingOps:
    """Those beside a decoder's `kernels`."""
    if kernels == "cpu":
        return cpu_sampling_ops()
    return triton_sampling_ops() if kernels == "triton" else reference_sampling_ops()


def _on_cpu_kernels(
    model: DecoderConfig,
    checkpoint: WeightSource,
    load: LoadTensor,
    asked: Quantization | None,
    max_model_len: int,
) -> LoadedDecoder:
    specs = matrix_specs(model)
    try:
        if asked == "none":
            quantization: Quantization = asked
            packed = pack_in_memory(specs, asked, load)
        else:
            cache = PackedWeightsCache(cache_dir() / "packed", checkpoint.version(), specs, load)
            quantization = asked or ("int4" if is_on_int4_grid(specs, load) else "int8")
            packed = cache.open(quantization)
    except ValueError as error:
        raise ModelError(
            f"The weights can't be quantized: {error}; quantization none can."
        ) from error
    weights: DecoderWeights[PackedMatrix] = load_weights(
        model, load, lambda spec: packed[spec.name]
    )
    decoder = FusedDecoder(model, weights, max_model_len)
    return _loaded(decoder, cpu_ops(), quantization, batch_invariant=True)


def _op_by_op(
    model: DecoderConfig,
    load: LoadTensor,
    kernels: str,
    batch_invariant: bool,
    max_model_len: int,
) -> LoadedDecoder:
    weights = load_weights(model, load, lambda spec: spec.load(load))
    if kernels == "triton":
        ops = triton_ops(batch_invariant)
    else:
        ops = _batch_invariant_ops(model, weights) if batch_invariant else reference_ops()
    decoder = Decoder(model, weights, ops, max_model_len)
    return _loaded(decoder, ops, "none", batch_invariant)


def _op_by_op_quantized(
    model: DecoderConfig,
    load: LoadTensor,
    kernels: str,
    quantization: Quantization,
    batch_invariant: bool,
    max_model_len: int,
) -> LoadedDecoder:
    def quantized(spec: MatrixSpec) -> QuantizedMatrix:
        return quantize_matrix(spec.load(load), quantization_of(spec, quantization))

    if kernels == "triton":
        from kernels.triton.quantized import IntMatrix

        ints = load_weights(model, load, lambda spec: IntMatrix.of(quantized(spec)))
        int_ops = quantized_triton_ops(batch_invariant)
        decoder: StepDecoder = Decoder(model, ints, int_ops, max_model_len)
        return _loaded(decoder, int_ops, quantization, batch_invariant)
    if batch_invariant:
        raise ModelError("batch_invariant with quantized weights needs other kernels.")
    ops = quantized_reference_ops()
    decoder = Decoder(model, load_weights(model, load, quantized), ops, max_model_len)
    return _loaded(decoder, ops, quantization, batch_invariant)


def _in_fp8(
    model: DecoderConfig, load: LoadTensor, kernels: str, max_model_len: int
) -> LoadedDecoder:
    if kernels != "triton":
        raise ModelError("The quantization fp8 needs the triton kernels.")
    from kernels.triton.fp8 import quantize_fp8

    ops = fp8_triton_ops()
    weights = load_weights(model, load, lambda spec: quantize_fp8(spec.load(load)))
    decoder = Decoder(model, weights, ops, max_model_len)
    return _loaded(decoder, ops, _FP8, batch_invariant=True)


def _loaded(
    decoder: StepDecoder, ops: Ops[M], quantization: str, batch_invariant: bool
) -> LoadedDecoder:
    return LoadedDecoder(decoder, ops.copy_blocks, op_backends(ops), quantization, batch_invariant)


def _batch_invariant_ops(model: DecoderConfig, weights: DecoderWeights[Tensor]) -> Ops[Tensor]:
    layer = weights.layers[0]  # the others have the same shapes
    matrices = (layer.qkv_OH, layer.output_HO, layer.gate_up_GH, layer.down_HF, weights.head_VH)
    try:
        return batch_invariant_ops(matrices, model.num_kv_heads, model.head_dim)
    except NotBatchInvariant as error:
        raise ModelError(
            "batch_invariant cannot be had on this machine: a row of a matrix product depends on "
            "its place in the batch; try another num_threads, dtype or device."
        ) from error
