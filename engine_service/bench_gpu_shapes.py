"""Shapes of models that `bench_gpu` computes with random weights, and what a step of them costs.

    linear operations      2 for each weight of the layers and token, and of the head and logit row
    attention operations   4 * query heads * head size for each query and key that it sees
    bytes of a decode      every weight once, and the keys and values of every context

An operation is a multiplication or an addition. The embedding is looked up, which costs neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_model_len: int  # tokens
    dtype: str

    @property
    def layer_weights(self) -> int:
        """Of the matrices of all layers."""
        attention = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim * self.hidden_size
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def stored_weights(self) -> int:
        """Of all matrices, the embedding's among them."""
        num_tables = 1 if self.tie_word_embeddings else 2
        return self.layer_weights + num_tables * self.head_weights

    @property
    def kv_numbers(self) -> int:
        """Of one token, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def linear_operations(self, num_tokens: int, num_logit_rows: int) -> int:
        return 2 * (num_tokens * self.layer_weights + num_logit_rows * self.head_weights)

    def attention_operations(self, num_tokens: int) -> int:
        """Of a prompt's prefill."""
        num_pairs = num_tokens * (num_tokens + 1) // 2
        return 4 * self.num_layers * self.num_heads * self.head_dim * num_pairs

    def decode_bytes(self, context_tokens: int, weight_bytes: int, kv_bytes: int) -> int:
        """Read in a step of decodes whose contexts have so many tokens together; a weight and a
        number of the KV cache have so many bytes."""
        weights = self.layer_weights + self.head_weights
        return weights * weight_bytes + context_tokens * self.kv_numbers * kv_bytes

    def write_config(self, model_dir: Path) -> None:
        """config.json, all that a model with dummy weights needs."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": self.tie_word_embeddings,
            "dtype": self.dtype,
        }
        (model_dir / "config.json").write_text(json.dumps(config), encoding="utf-8")


LLAMA_1B: Final = ModelShape(
    name="Llama-3.2-1B",
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    vocab_size=128_256,
    tie_word_embeddings=True,
    max_model_len=131_072,
    dtype="bfloat16",
)
LLAMA_8B: Final = ModelShape(
    name="Llama-3.1-8B",
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=128_256,
    tie_word_embeddings=False,
    max_model_len=131_072,
    dtype="bfloat16",
)
