"""Which architectures the native decoder runs, by the name in config.json's `architectures`.

Imports nothing, so that the model store and the command line can ask without loading torch.
"""

from __future__ import annotations

SUPPORTED_ARCHITECTURES: frozenset[str] = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
