"""The fused decoder: all layers of a step in one call, the same bits as op by op."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.library import POINTER, address, function
from kernels.cpu.linear import FORMATS, PackedMatrix


@dataclass(frozen=True, slots=True)
class DecoderShape:
    hidden_size: int
    inner_size: int  # of the MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer's weights; vectors are float32 and contiguous. Letters as in `kernels.ops`."""

    input_norm_H: Tensor
    qkv: PackedMatrix
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output: PackedMatrix
    output_bias_H: Tensor | None
    post_attention_norm_H: Tensor
    gate_up: PackedMatrix
    gate_up_bias_G: Tensor | None
    down: PackedMatrix
    down_bias_H: Tensor | None
    sliding_window: int | None  # tokens


class _Shape(ctypes.Structure):
    _fields_ = (
        ("hidden_size", ctypes.c_int64),
        ("inner_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("rms_norm_eps", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
    )


class _Matrix(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_int32),
        ("num_outputs", ctypes.c_int64),
        ("num_inputs", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )

    @classmethod
    def of(cls, matrix: PackedMatrix) -> _Matrix:
        return cls(
            FORMATS[matrix.quantization],
            matrix.num_outputs,
            matrix.num_inputs,
            matrix.data.data_ptr(),
        )


class _Layer(ctypes.Structure):
    _fields_ = (
        ("input_norm_H", ctypes.c_void_p),
        ("qkv", _Matrix),
        ("qkv_bias_O", ctypes.c_void_p),
        ("q_norm_D", ctypes.c_void_p),
        ("k_norm_D", ctypes.c_void_p),
        ("output", _Matrix),
        ("output_bias_H", ctypes.c_void_p),
        ("post_attention_norm_H", ctypes.c_void_p),
        ("gate_up", _Matrix),
        ("gate_up_bias_G", ctypes.c_void_p),
        ("down", _Matrix),
        ("down_bias_H", ctypes.c_void_p),
        ("sliding_window", ctypes.c_int64),
    )


class _Batch(ctypes.Structure):
    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_requests", ctypes.c_int64),
        ("positions_T", ctypes.c_void_p),
        ("slot_mapping_T", ctypes.c_void_p),
        ("query_start_loc_R1", ctypes.c_void_p),
        ("seq_lens_R", ctypes.c_void_p),
        ("block_table_RM", ctypes.c_void_p),
        ("blocks_per_row", ctypes.c_int64),
    )


class _KVCache(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes_per_half_layer", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("is_half", ctypes.c_int32),
    )


class DecoderLayers:
    """Keeps the weights alive that it points to. Used by one thread at a time."""

    def __init__(
        self, shape: DecoderShape, layers: Sequence[FusedLayer], cos_sin_PD: Tensor
    ) -> None:
        self._kept = (tuple(layers), cos_sin_PD)
        self._forward = function("ft_decoder_forward", (POINTER, POINTER, POINTER, POINTER))
        new = function("ft_decoder_new", (POINTER, POINTER), ctypes.c_void_p)
        add_layer = function("ft_decoder_add_layer", (POINTER, POINTER))
        c_shape = _Shape(
            shape.hidden_size,
            shape.inner_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.rms_norm_eps,
            shape.head_dim**-0.5,
        )
        self._handle = new(ctypes.addressof(c_shape), cos_sin_PD.data_ptr())
        weakref.finalize(self, function("ft_decoder_free", (POINTER,)), self._handle)
        for layer in layers:
            c_layer = _c_layer(layer)  # alive during the call, which copies it
            add_layer(self._handle, ctypes.addressof(c_layer))

    def forward(
        self,
        hidden_TH: Tensor,
        positions_T: Tensor,
        slot_mapping_T: Tensor,
        query_start_loc_R1: Tensor,
        seq_lens_R: Tensor,
        block_table_RM: Tensor,
        kv_cache_L2BSKD: Tensor,
    ) -> None:
        """`hidden_TH` holds the embedded tokens, and then what the last layer leaves.

        float32 and contiguous; the other arguments are those of the single ops.
        """
        batch = _Batch(
            hidden_TH.shape[0],
            seq_lens_R.shape[0],
            positions_T.data_ptr(),
            slot_mapping_T.data_ptr(),
            query_start_loc_R1.data_ptr(),
            seq_lens_R.data_ptr(),
            block_table_RM.data_ptr(),
            block_table_RM.shape[1],
        )
        cache = _KVCache(
            kv_cache_L2BSKD.data_ptr(),
            kv_cache_L2BSKD.stride(1) * kv_cache_L2BSKD.itemsize,
            kv_cache_L2BSKD.shape[3],
            kv_cache_L2BSKD.dtype == torch.float16,
        )
        self._forward(
            self._handle,
            ctypes.addressof(batch),
            ctypes.addressof(cache),
            hidden_TH.data_ptr(),
        )


def _c_layer(layer: FusedLayer) -> _Layer:
    return _Layer(
        address(layer.input_norm_H),
        _Matrix.of(layer.qkv),
        address(layer.qkv_bias_O),
        address(layer.q_norm_D),
        address(layer.k_norm_D),
        _Matrix.of(layer.output),
        address(layer.output_bias_H),
        address(layer.post_attention_norm_H),
        _Matrix.of(layer.gate_up),
        address(layer.gate_up_bias_G),
        _Matrix.of(layer.down),
        address(layer.down_bias_H),
        layer.sliding_window or 0,
    )
