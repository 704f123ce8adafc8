"""The decoder as one call a step, on the CPU kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_service.input_batch import InputBatch
from engine_service.models.config import DecoderConfig
from engine_service.models.decoder import StepDecoder
from engine_service.models.rotary import rotary_table
from engine_service.models.weights import DecoderWeights, LayerWeights
from kernels.cpu.decoder import DecoderLayers, DecoderShape, FusedLayer
from kernels.cpu.embedding import embed
from kernels.cpu.linear import PackedMatrix, linear
from kernels.cpu.norm import rms_norm


class FusedDecoder(StepDecoder):
    """The same bits as `Decoder` with the CPU kernels' ops. Used by one thread."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights[PackedMatrix], max_model_len: int
    ) -> None:
        self._eps = config.rms_norm_eps
        self._weights = weights
        shape = DecoderShape(
            hidden_size=config.hidden_size,
            inner_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        layers = [
            _fused_layer(layer, window)
            for layer, window in zip(weights.layers, config.sliding_windows, strict=True)
        ]
        table_PD = rotary_table(config.rope, config.head_dim, max_model_len)
        self._layers = DecoderLayers(shape, layers, table_PD)
        self._logits_RV = torch.empty(0, config.vocab_size)  # grown to the most rows seen

    def forward(self, batch: InputBatch, kv_cache_L2BSKD: Tensor) -> Tensor:
        hidden_TH = embed(batch.input_ids_T, self._weights.embedding_VH)
        self._layers.forward(
            hidden_TH,
            batch.positions_T,
            batch.slot_mapping_T,
            batch.query_start_loc_R1,
            batch.seq_lens_R,
            batch.block_table_RM,
            kv_cache_L2BSKD,
        )
        return hidden_TH

    def logits(self, hidden_RH: Tensor) -> Tensor:
        num_rows = len(hidden_RH)
        if len(self._logits_RV) < num_rows:
            self._logits_RV = torch.empty(num_rows, self._logits_RV.shape[1])
        x_RH = rms_norm(hidden_RH, self._weights.final_norm_H, self._eps)
        return linear(x_RH, self._weights.head_VH, None, self._logits_RV[:num_rows])


def _fused_layer(weights: LayerWeights[PackedMatrix], sliding_window: int | None) -> FusedLayer:
    return FusedLayer(
        input_norm_H=weights.input_norm_H,
        qkv=weights.qkv_OH,
        qkv_bias_O=weights.qkv_bias_O,
        q_norm_D=weights.q_norm_D,
        k_norm_D=weights.k_norm_D,
        output=weights.output_HO,
        output_bias_H=weights.output_bias_H,
        post_attention_norm_H=weights.post_attention_norm_H,
        gate_up=weights.gate_up_GH,
        gate_up_bias_G=weights.gate_up_bias_G,
        down=weights.down_HF,
        down_bias_H=weights.down_bias_H,
        sliding_window=sliding_window,
    )
