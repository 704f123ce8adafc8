"""Imports a GGUF model once into the directory form that everything else reads.

    python -m engine_service.gguf_import GGUF OUT_DIR

    OUT_DIR/model.safetensors        float32: the exact values of the quantized blocks
            config.json              as transformers writes it for LlamaForCausalLM
            tokenizer.json           with tokenizer_config.json and chat_template.jinja
            generation_config.json   token ids only; a GGUF carries no sampling defaults

The directory is built beside its place under a lock and renamed at the end: a killed import leaves
nothing half done, and of two at once the second waits and finds the work done.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor
from gguf.quants import dequantize
from tqdm import tqdm

from engine_service.gguf_metadata import GgufFile
from engine_service.gguf_tokenizer import check_tokenizer, write_tokenizer
from engine_service.model_error import ModelError

_T = TypeVar("_T")
Float32Array = npt.NDArray[np.float32]

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",  # absent when tied to the embedding
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# Metadata of Llama variants that LlamaForCausalLM's plain form would compute wrongly.
_UNSUPPORTED_KEYS = ("llama.expert_count", "llama.rope.scaling.type")


def import_gguf(gguf_path: Path, out_dir: Path) -> None:
    """Imports `gguf_path` into `out_dir`; does nothing when that directory stands already."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out_dir.parent / f".{out_dir.name}.lock"):
        if out_dir.exists():
            return
        partial_dir = out_dir.parent / f".{out_dir.name}.partial"
        shutil.rmtree(partial_dir, ignore_errors=True)  # of a killed import: we hold the lock
        partial_dir.mkdir()
        try:
            _write_model(GgufFile(gguf_path), partial_dir)
            partial_dir.rename(out_dir)
        finally:
            shutil.rmtree(partial_dir, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """The system drops the lock with the process, so a killed holder blocks nobody."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write_model(gguf: GgufFile, out_dir: Path) -> None:
    architecture = gguf.string("general.architecture")
    if architecture != "llama":
        raise ModelError(
            f"{gguf.path.name} is a {architecture} model; only llama ones can be imported. "
            "Use the model's safetensors directory in place of its GGUF."
        )
    for key in _UNSUPPORTED_KEYS:
        if gguf.has(key):
            raise ModelError(f"{gguf.path.name} cannot be imported: it sets {key}.")
    check_tokenizer(gguf)
    shape = _ModelShape.of(gguf)
    tensors = _tensors_by_hf_name(gguf, shape.num_layers)
    _write_json(out_dir / "config.json", _config(gguf, shape, tensors))
    _write_json(out_dir / "generation_config.json", _special_token_ids(gguf))
    write_tokenizer(gguf, out_dir)
    _write_safetensors(out_dir / "model.safetensors", tensors, shape)


@dataclass(frozen=True, slots=True)
class _ModelShape:
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    head_dim: int

    @classmethod
    def of(cls, gguf: GgufFile) -> _ModelShape:
        num_heads = gguf.integer("llama.attention.head_count")
        hidden_size = gguf.integer("llama.embedding_length")
        kv_key, dim_key = "llama.attention.head_count_kv", "llama.attention.key_length"
        return cls(
            num_layers=gguf.integer("llama.block_count"),
            num_heads=num_heads,
            num_kv_heads=gguf.integer(kv_key) if gguf.has(kv_key) else num_heads,
            hidden_size=hidden_size,
            head_dim=gguf.integer(dim_key) if gguf.has(dim_key) else hidden_size // num_heads,
        )


def _tensors_by_hf_name(gguf: GgufFile, num_layers: int) -> dict[str, ReaderTensor]:
    names = dict(_TOP_LEVEL_NAMES)
    for layer in range(num_layers):
        for gguf_name, hf_name in _LAYER_NAMES.items():
            names[f"blk.{layer}.{gguf_name}"] = f"model.layers.{layer}.{hf_name}"
    found = {tensor.name: tensor for tensor in gguf.reader.tensors}
    if unexpected := sorted(found.keys() - names.keys()):
        raise ModelError(f"{gguf.path.name} has a tensor of no known use: {unexpected[0]}.")
    if missing := sorted(names.keys() - found.keys() - {"output.weight"}):
        raise ModelError(f"{gguf.path.name} lacks the tensor {missing[0]}.")
    return {hf_name: found[name] for name, hf_name in names.items() if name in found}


def _config(
    gguf: GgufFile, shape: _ModelShape, tensors: dict[str, ReaderTensor]
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(gguf.strings("tokenizer.ggml.tokens")),
        "hidden_size": shape.hidden_size,
        "intermediate_size": gguf.integer("llama.feed_forward_length"),
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.integer("llama.context_length"),
        "rms_norm_eps": gguf.float32("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.float32("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_special_token_ids(gguf),
    }


def _special_token_ids(gguf: GgufFile) -> dict[str, object]:
    keys = {
        "bos_token_id": "tokenizer.ggml.bos_token_id",
        "eos_token_id": "tokenizer.ggml.eos_token_id",
        "pad_token_id": "tokenizer.ggml.padding_token_id",
    }
    return {name: gguf.integer(key) for name, key in keys.items() if gguf.has(key)}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_safetensors(path: Path, tensors: dict[str, ReaderTensor], shape: _ModelShape) -> None:
    """Streams one tensor at a time, so that memory holds one however large the model is.

    The format: the header's length (8 bytes, little endian), a JSON header, then the raw data.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        size = int(tensor.n_elements) * 4
        dims = [int(dim) for dim in reversed(tensor.shape.tolist())]
        header[name] = {"dtype": "F32", "shape": dims, "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for name, tensor in _with_progress(tensors.items(), len(tensors)):
            file.write(_weights(name, tensor, shape).astype("<f4", copy=False).tobytes())
        file.flush()
        os.fsync(file.fileno())  # before the rename, or a power cut could leave holes in its place


def _weights(name: str, tensor: ReaderTensor, shape: _ModelShape) -> Float32Array:
    try:
        weights: Float32Array = dequantize(tensor.data, tensor.tensor_type)
    except (NotImplementedError, ValueError) as error:  # gguf's own, for types that it can't read
        raise ModelError(f"The tensor {tensor.name} cannot be read: {error}") from error
    if name.endswith("q_proj.weight"):
        return _undo_rope_interleaving(weights, shape.num_heads)
    if name.endswith("k_proj.weight"):
        return _undo_rope_interleaving(weights, shape.num_kv_heads)
    return weights


def _undo_rope_interleaving(weights: Float32Array, num_heads: int) -> Float32Array:
    """Per head, GGUF has rotary pairs side by side (0, d/2, 1, d/2+1, ...); we want two halves."""
    pairs = weights.reshape(num_heads, -1, 2, weights.shape[1])
    return pairs.swapaxes(1, 2).reshape(weights.shape)


def _with_progress(items: Iterable[_T], total: int) -> Iterator[_T]:
    """A bar on a terminal, a line per quarter in a log."""
    if sys.stderr.isatty():
        yield from tqdm(items, total=total, desc="Importing the model", unit="tensor")
        return
    for index, item in enumerate(items, start=1):
        yield item
        if index * 4 // total > (index - 1) * 4 // total:
            print(f"Importing the model: {index * 100 // total} %", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine_service.gguf_import",
        description="Import a GGUF model into a directory of safetensors, config and tokenizer.",
    )
    parser.add_argument("gguf", type=Path, help="the GGUF file")
    parser.add_argument("out_dir", type=Path, help="the directory to write; must not exist")
    arguments = parser.parse_args()
    if arguments.out_dir.exists():
        print(f"error: {arguments.out_dir} exists already.", file=sys.stderr)
        return 2
    try:
        import_gguf(arguments.gguf, arguments.out_dir)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(arguments.out_dir)
    return 0


if __name__ == "__main__":
    sys.exit(main())
