"""The decoder of the Llama family, from token ids to logits, on a flat ragged batch.

    ids -> embedding -> [ norm -> attention -> norm -> MLP ] x layers -> norm -> head

Attention and MLP each add what they find to the residual stream, which is all that passes from
layer to layer. Rows of one request attend to its own context only, through the block table;
everything else is row by row. Dimensions are lettered as in `kernels.ops`.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from engine_service.input_batch import InputBatch
from engine_service.models.config import DecoderConfig
from engine_service.models.rotary import rotary_table
from engine_service.models.weights import DecoderWeights, LayerWeights
from kernels.ops import Ops

M = TypeVar("M")  # the backend's form of a matrix


class StepDecoder(Protocol):
    """Computes; owns no state but weights. The KV cache is the caller's and written in place."""

    def forward(self, batch: InputBatch, kv_cache_L2BSKD: Tensor) -> Tensor:
        """What the last layer leaves of each token, [T, H]; the step's KV is written."""

    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Logits of some rows of `forward`'s result, [R, V], float32.

        The caller's to overwrite; valid until the next call.
        """


class Decoder(Generic[M]):
    """A StepDecoder of single ops, whatever computes them."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights[M], ops: Ops[M], max_model_len: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._ops = ops
        norm_H = weights.final_norm_H
        table = rotary_table(config.rope, config.head_dim, max_model_len)
        self._cos_sin_PD = table.to(dtype=norm_H.dtype, device=norm_H.device)

    def forward(self, batch: InputBatch, kv_cache_L2BSKD: Tensor) -> Tensor:
        ops, eps, layers = self._ops, self._config.rms_norm_eps, self._weights.layers
        residual_TH = ops.embed(batch.input_ids_T, self._weights.embedding_VH)
        residual_TH = residual_TH.to(self._cos_sin_PD.dtype)  # a quantized table gives float32
        x_TH = ops.rms_norm(residual_TH, layers[0].input_norm_H, eps)
        for layer, weights in enumerate(layers):
            x_TH = self._attention(x_TH, layer, weights, batch, kv_cache_L2BSKD[layer])
            x_TH = ops.add_rms_norm(x_TH, residual_TH, weights.post_attention_norm_H, eps)
            x_TH = self._mlp(x_TH, weights)
            if layer + 1 < len(layers):
                x_TH = ops.add_rms_norm(x_TH, residual_TH, layers[layer + 1].input_norm_H, eps)
        return residual_TH.add_(x_TH)

    def logits(self, hidden_RH: Tensor) -> Tensor:
        eps = self._config.rms_norm_eps
        x_RH = self._ops.rms_norm(hidden_RH, self._weights.final_norm_H, eps)
        return self._ops.logits_head(x_RH, self._weights.head_VH)

    def _attention(
        self,
        x_TH: Tensor,
        layer: int,
        weights: LayerWeights[M],
        batch: InputBatch,
        kv_cache_2BSKD: Tensor,
    ) -> Tensor:
        config, ops = self._config, self._ops
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        qkv_TO = ops.linear(x_TH, weights.qkv_OH, weights.qkv_bias_O)
        qkv_TXD = qkv_TO.view(-1, heads + 2 * kv_heads, config.head_dim)
        q_TND, k_TKD, v_TKD = torch.split(qkv_TXD, [heads, kv_heads, kv_heads], dim=1)
        if weights.q_norm_D is not None and weights.k_norm_D is not None:
            q_TND = ops.rms_norm(q_TND, weights.q_norm_D, eps)
            k_TKD = ops.rms_norm(k_TKD, weights.k_norm_D, eps)
        ops.rotary_cache_write(
            q_TND,
            k_TKD,
            v_TKD,
            self._cos_sin_PD,
            batch.positions_T,
            batch.slot_mapping_T,
            kv_cache_2BSKD,
        )
        out_TND = ops.paged_attention(
            q_TND,
            kv_cache_2BSKD,
            batch.query_start_loc_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            config.head_dim**-0.5,
            config.sliding_windows[layer],
        )
        return ops.linear(out_TND.flatten(1), weights.output_HO, weights.output_bias_H)

    def _mlp(self, x_TH: Tensor, weights: LayerWeights[M]) -> Tensor:
        gate_up_TG = self._ops.linear(x_TH, weights.gate_up_GH, weights.gate_up_bias_G)
        x_TF = self._ops.silu_mul(gate_up_TG)
        return self._ops.linear(x_TF, weights.down_HF, weights.down_bias_H)
