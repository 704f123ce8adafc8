"""The decoder's weights: which tensors a checkpoint must hold, and how they are fused.

Query, key and value projections become one matrix, and so do gate and up, because few large
products are faster than many small ones:

    qkv  [N*D | K*D | K*D] x H        gate_up  [F | F] x H
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from engine_service.models.config import DecoderConfig

LoadTensor = Callable[[str], Tensor]  # by checkpoint name, in the decoder's dtype and device
M = TypeVar("M")  # the backend's form of a matrix

HEAD = "head"


@dataclass(frozen=True, slots=True)
class MatrixSpec:
    """A matrix of the decoder: checkpoint tensors, one below the other."""

    name: str
    num_outputs: int
    num_inputs: int
    tensor_names: tuple[str, ...]

    def load(self, load: LoadTensor) -> Tensor:
        """[num_outputs, num_inputs]"""
        return _stacked(load, self.tensor_names)


MakeMatrix = Callable[[MatrixSpec], M]


@dataclass(frozen=True, slots=True)
class LayerWeights(Generic[M]):
    input_norm_H: Tensor
    qkv_OH: M
    qkv_bias_O: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    output_HO: M
    output_bias_H: Tensor | None
    post_attention_norm_H: Tensor
    gate_up_GH: M
    gate_up_bias_G: Tensor | None
    down_HF: M
    down_bias_H: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights(Generic[M]):
    embedding_VH: M | Tensor  # the head itself when tied
    layers: tuple[LayerWeights[M], ...]
    final_norm_H: Tensor
    head_VH: M


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


def matrix_specs(config: DecoderConfig) -> dict[str, MatrixSpec]:
    """All matrices, by name."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    specs = [MatrixSpec(HEAD, config.vocab_size, hidden, (f"{head}.weight",))]
    for i in range(config.num_layers):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = tuple(f"{attention}.{name}_proj.weight" for name in ("q", "k", "v"))
        gate_up = (f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight")
        specs += [
            MatrixSpec(f"layers.{i}.qkv", query_size + 2 * kv_size, hidden, qkv),
            MatrixSpec(f"layers.{i}.output", hidden, query_size, (f"{attention}.o_proj.weight",)),
            MatrixSpec(f"layers.{i}.gate_up", 2 * inner, hidden, gate_up),
            MatrixSpec(f"layers.{i}.down", hidden, inner, (f"{mlp}.down_proj.weight",)),
        ]
    return {spec.name: spec for spec in specs}


def load_weights(
    config: DecoderConfig, load: LoadTensor, make_matrix: MakeMatrix[M]
) -> DecoderWeights[M]:
    """Needs a checkpoint that holds `expected_shapes`; makes each of `matrix_specs` once."""
    specs = matrix_specs(config)
    head_VH = make_matrix(specs[HEAD])
    tied = config.tie_word_embeddings
    return DecoderWeights(
        embedding_VH=head_VH if tied else load("model.embed_tokens.weight"),
        layers=tuple(
            _load_layer(config, load, lambda name: make_matrix(specs[name]), i)
            for i in range(config.num_layers)
        ),
        final_norm_H=load("model.norm.weight"),
        head_VH=head_VH,
    )


def _load_layer(
    config: DecoderConfig, load: LoadTensor, matrix: Callable[[str], M], index: int
) -> LayerWeights[M]:
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def bias(modules: Sequence[str], exists: bool) -> Tensor | None:
        return _stacked(load, [f"{module}.bias" for module in modules]) if exists else None

    return LayerWeights(
        input_norm_H=load(f"{layer}.input_layernorm.weight"),
        qkv_OH=matrix(f"layers.{index}.qkv"),
        qkv_bias_O=bias([f"{attention}.{name}_proj" for name in "qkv"], config.qkv_bias),
        q_norm_D=load(f"{attention}.q_norm.weight") if config.qk_norm else None,
        k_norm_D=load(f"{attention}.k_norm.weight") if config.qk_norm else None,
        output_HO=matrix(f"layers.{index}.output"),
        output_bias_H=bias([f"{attention}.o_proj"], config.output_bias),
        post_attention_norm_H=load(f"{layer}.post_attention_layernorm.weight"),
        gate_up_GH=matrix(f"layers.{index}.gate_up"),
        gate_up_bias_G=bias([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias),
        down_HF=matrix(f"layers.{index}.down"),
        down_bias_H=bias([f"{mlp}.down_proj"], config.mlp_bias),
    )


def _stacked(load: LoadTensor, names: Sequence[str]) -> Tensor:
    tensors = [load(name) for name in names]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
