"""config.json as found in the wild: what is read, what is defaulted, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine_service.model_error import ModelError
from engine_service.models.config import RopeConfig, read_config, read_eos_token_ids
from engine_service.models.registry import SUPPORTED_ARCHITECTURES
from engine_service.models.rotary import rotary_table

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


def write(directory: Path, **fields: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**LLAMA, **fields}))
    return directory


@pytest.mark.parametrize("architecture", sorted(SUPPORTED_ARCHITECTURES))
def test_missing_keys_mean_what_transformers_takes_them_for(
    tmp_path: Path, architecture: str
) -> None:
    model_type = architecture.removesuffix("ForCausalLM").lower()
    fields = {"num_attention_heads": 32, "hidden_size": 256}
    config = read_config(write(tmp_path, architectures=[architecture], **fields))
    theirs = AutoConfig.for_model(model_type, **{**LLAMA, **fields})
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.head_dim == getattr(theirs, "head_dim", None) or 256 // 32
    window = theirs.sliding_window if model_type != "llama" else None
    assert config.sliding_windows == (window,) * 3
    assert config.rope == RopeConfig("default", theirs.rope_parameters["rope_theta"])


ROPES: list[dict[str, object]] = [
    {"rope_theta": 5e5},
    {"rope_theta": 5e5, "rope_scaling": None},
    {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2}},
    {
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
]


@pytest.mark.parametrize("fields", ROPES)
def test_rotary_tables_are_those_of_transformers(tmp_path: Path, fields: dict[str, object]) -> None:
    config = read_config(write(tmp_path, max_position_embeddings=512, head_dim=32, **fields))
    theirs = AutoConfig.for_model(
        "llama", **{**LLAMA, "max_position_embeddings": 512, "head_dim": 32, **fields}
    )
    kind = theirs.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, 32, 2).float() / 32
        frequencies = 1.0 / theirs.rope_parameters["rope_theta"] ** exponents
    else:
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    angles = torch.outer(torch.arange(512).float(), frequencies)
    table = rotary_table(config.rope, 32, 512)
    torch.testing.assert_close(table, torch.cat((angles.cos(), angles.sin()), -1))


def test_sliding_windows_by_layer(tmp_path: Path) -> None:
    def windows(**fields: object) -> tuple[int | None, ...]:
        return read_config(write(tmp_path, num_key_value_heads=6, **fields)).sliding_windows

    mistral, qwen2 = ["MistralForCausalLM"], ["Qwen2ForCausalLM"]
    assert windows(sliding_window=7) == (None,) * 3  # no key of Llama's
    assert windows(architectures=mistral, sliding_window=None) == (None,) * 3
    assert windows(architectures=mistral, sliding_window=7) == (7, 7, 7)
    assert windows(architectures=qwen2, sliding_window=7) == (None,) * 3
    opted_in: dict[str, object] = {
        "architectures": qwen2,
        "sliding_window": 7,
        "use_sliding_window": True,
    }
    assert windows(**opted_in, max_window_layers=2) == (None, None, 7)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(**opted_in, layer_types=layer_types) == (7, None, 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported"),
        ({"architectures": []}, "not supported"),
        ({"hidden_size": "48"}, r"\$\.hidden_size"),
        ({"vocab_size": None}, r"\$\.vocab_size"),
        ({"num_hidden_layers": 0}, "size below 1"),
        ({"num_key_value_heads": 4}, "cannot share"),
        ({"hidden_act": "gelu"}, "'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "'yarn' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "lacks some"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "num_key_value_heads": 6,
                "sliding_window": 0,
            },
            "at least 1",
        ),
    ],
)
def test_refused_by_name(tmp_path: Path, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_config(write(tmp_path, **fields))


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"architectures": "Llama"}'])
def test_broken_files_are_model_errors(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


def test_an_absent_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_config(tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, eos_token_id=2))
    assert read_eos_token_ids(tmp_path, config) == (2,)
    generation = tmp_path / "generation_config.json"
    for content, ids in (
        ({"eos_token_id": [7, 9]}, (7, 9)),
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": None}, (2,)),
        ({}, (2,)),
    ):
        generation.write_text(json.dumps(content))
        assert read_eos_token_ids(tmp_path, config) == ids
    for broken in ("{", "[]", '{"eos_token_id": "2"}'):
        generation.write_text(broken)
        with pytest.raises(ModelError, match="generation_config"):
            read_eos_token_ids(tmp_path, config)
