"""The decoder's weights: which tensors a checkpoint must hold, and how they are fused.

Query, key and value projections become one matrix, and so do gate and up, because few large
products are faster than many small ones:

    qkv  [N*D | K*D | K*D] x H        gate_up  [F | F] x H
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine_service.models.config import DecoderConfig

LoadTensor = Callable[[str], Tensor]  # by checkpoint name, in the decoder's dtype and device


@dataclass(frozen=True, slots=True)
class LayerWeights:
    input_norm_H: Tensor
    qkv_OH: Tensor
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output_HO: Tensor
    output_bias_H: Tensor | None
    post_attention_norm_H: Tensor
    gate_up_GH: Tensor
    gate_up_bias_G: Tensor | None
    down_HF: Tensor
    down_bias_H: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_H: Tensor
    head_VH: Tensor  # the embedding itself when tied


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the checkpoint must hold, by name; it may hold no others."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)

    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, num_out, num_in, has_bias in (
            ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q_size, config.output_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        ):
            shapes[f"{layer}.{name}.weight"] = (num_out, num_in)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (num_out,)
    return shapes


def ignored_tensors(config: DecoderConfig) -> frozenset[str]:
    """Tensors that some checkpoints carry although they follow from the rest."""
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(buffers | ({"lm_head.weight"} if config.tie_word_embeddings else set()))


def load_weights(config: DecoderConfig, load: LoadTensor) -> DecoderWeights:
    """Needs a checkpoint that holds `expected_shapes`."""
    embedding_VH = load("model.embed_tokens.weight")
    return DecoderWeights(
        embedding_VH=embedding_VH,
        layers=tuple(_load_layer(config, load, i) for i in range(config.num_layers)),
        final_norm_H=load("model.norm.weight"),
        head_VH=embedding_VH if config.tie_word_embeddings else load("lm_head.weight"),
    )


def _load_layer(config: DecoderConfig, load: LoadTensor, index: int) -> LayerWeights:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    qkv = [f"{attention}.{name}_proj" for name in ("q", "k", "v")]
    gate_up = [f"{mlp}.gate_proj", f"{mlp}.up_proj"]

    def stacked(modules: list[str], kind: str) -> Tensor:
        return torch.cat([load(f"{module}.{kind}") for module in modules])

    return LayerWeights(
        input_norm_H=load(f"{layer}.input_layernorm.weight"),
        qkv_OH=stacked(qkv, "weight"),
        qkv_bias_O=stacked(qkv, "bias") if config.qkv_bias else None,
        q_norm_D=load(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm_D=load(f"{attention}.k_norm.weight") if config.qk_norm else None,
        output_HO=load(f"{attention}.o_proj.weight"),
        output_bias_H=load(f"{attention}.o_proj.bias") if config.output_bias else None,
        post_attention_norm_H=load(f"{layer}.post_attention_layernorm.weight"),
        gate_up_GH=stacked(gate_up, "weight"),
        gate_up_bias_G=stacked(gate_up, "bias") if config.mlp_bias else None,
        down_HF=load(f"{mlp}.down_proj.weight"),
        down_bias_H=load(f"{mlp}.down_proj.bias") if config.mlp_bias else None,
    )
