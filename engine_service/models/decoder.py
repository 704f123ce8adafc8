"""The decoder of the Llama family, from token ids to logits, on a flat ragged batch.

    ids -> embedding -> [ norm -> attention -> norm -> MLP ] x layers -> norm -> head

Each `norm` also adds the previous block's output to the residual stream. Rows of one request
attend to its own context only, through the block table; everything else is row by row.
Dimensions are lettered as in `kernels.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_service.input_batch import InputBatch
from engine_service.models.config import DecoderConfig
from engine_service.models.rotary import rotary_table
from engine_service.models.weights import DecoderWeights, LayerWeights
from kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the last layer left of each token, before the final norm."""

    x_TH: Tensor  # the last block's output
    residual_TH: Tensor  # to be added to it


class Decoder:
    """Computes; owns no state but weights. The KV cache is the caller's and written in place."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, ops: Ops, max_model_len: int
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = ops
        embedding = weights.embedding_VH
        table = rotary_table(config.rope, config.head_dim, max_model_len)
        self._cos_sin_PD = table.to(dtype=embedding.dtype, device=embedding.device)

    def forward(self, batch: InputBatch, kv_cache: Tensor) -> HiddenStates:
        """All that `logits` needs of the step.

        `kv_cache` is [layers, 2, B, S, K, D]; the step's keys and values are written to it.
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        residual_TH = F.embedding(batch.input_ids_T, self.weights.embedding_VH)
        x_TH = ops.rms_norm(residual_TH, self.weights.layers[0].input_norm_H, eps)
        for layer, weights in enumerate(self.weights.layers):
            x_TH = self._attention(x_TH, layer, weights, batch, kv_cache[layer])
            x_TH = ops.add_rms_norm(x_TH, residual_TH, weights.post_attention_norm_H, eps)
            x_TH = self._mlp(x_TH, weights)
            if layer + 1 < len(self.weights.layers):
                next_norm_H = self.weights.layers[layer + 1].input_norm_H
                x_TH = ops.add_rms_norm(x_TH, residual_TH, next_norm_H, eps)

        return HiddenStates(x_TH, residual_TH)

    def logits(self, hidden: HiddenStates, indices_R: Tensor) -> Tensor:
        """Logits of some flat rows of the step, [R, V], float32."""
        x_RH, residual_RH = hidden.x_TH[indices_R], hidden.residual_TH[indices_R]
        eps = self.config.rms_norm_eps
        x_RH = self.ops.add_rms_norm(x_RH, residual_RH, self.weights.final_norm_H, eps)
        return self.ops.logits_head(x_RH, self.weights.head_VH)

    def _attention(
        self,
        x_TH: Tensor,
        layer: int,
        weights: LayerWeights,
        batch: InputBatch,
        kv_cache_2BSKD: Tensor,
    ) -> Tensor:
        config, ops = self.config, self.ops
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

    def _mlp(self, x_TH: Tensor, weights: LayerWeights) -> Tensor:
        gate_up_TG = self.ops.linear(x_TH, weights.gate_up_GH, weights.gate_up_bias_G)
        x_TF = self.ops.silu_mul(gate_up_TG)
        return self.ops.linear(x_TF, weights.down_HF, weights.down_bias_H)
