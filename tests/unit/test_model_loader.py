"""Checkpoints: only safetensors, only the expected tensors, and every fault named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine_service.model_error import ModelError
from engine_service.model_loader import Checkpoint, check_shapes
from engine_service.models.config import read_config
from engine_service.models.weights import expected_shapes, ignored_tensors, load_weights
from tests.conftest import MakeTinyModel

CPU = torch.device("cpu")


@pytest.fixture
def model_dir(tiny_model_dir: MakeTinyModel, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")


def tensors(model_dir: Path) -> dict[str, Tensor]:
    return load_file(model_dir / "model.safetensors")


def check(model_dir: Path) -> None:
    config = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:
        check_shapes(checkpoint.shapes, expected_shapes(config), ignored_tensors(config))


def shard(model_dir: Path, names: dict[str, str] | None = None) -> None:
    """Splits the weights in two, with an index; `names` overrides its entries."""
    ordered = sorted(tensors(model_dir).items())
    weight_map: dict[str, str] = {}
    for i, part in enumerate((ordered[::2], ordered[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file(dict(part), model_dir / file)
        weight_map |= {name: file for name, _ in part}
    (model_dir / "model.safetensors").unlink()
    index = {"weight_map": weight_map | (names or {})}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))


def test_tensors_outlive_the_checkpoint_and_change_dtype(model_dir: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    with Checkpoint(model_dir) as checkpoint:
        same = checkpoint.load(name, torch.float32, CPU)
        half = checkpoint.load(name, torch.bfloat16, CPU)
    want = tensors(model_dir)[name]
    assert same.equal(want)
    assert half.equal(want.bfloat16())


def test_projections_are_fused_in_order(model_dir: Path) -> None:
    config = read_config(model_dir)
    with Checkpoint(model_dir) as checkpoint:

        def load(name: str) -> Tensor:
            return checkpoint.load(name, torch.float32, CPU)

        weights = load_weights(config, load, lambda spec: spec.load(load))
    found = tensors(model_dir)
    attention = [found[f"model.layers.2.self_attn.{n}_proj.weight"] for n in "qkv"]
    mlp = [found[f"model.layers.2.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert weights.layers[2].qkv_OH.equal(torch.cat(attention))
    assert weights.layers[2].gate_up_GH.equal(torch.cat(mlp))
    assert weights.head_VH is weights.embedding_VH


def test_a_touched_file_is_another_version_of_the_same_weights(model_dir: Path) -> None:
    with Checkpoint(model_dir) as checkpoint:
        digest, version = checkpoint.digest(), checkpoint.version()
        os.utime(model_dir / "model.safetensors", (1, 1))
        assert checkpoint.digest() == digest
        assert checkpoint.version() != version


def test_shards_hold_what_one_file_holds(model_dir: Path) -> None:
    with Checkpoint(model_dir) as checkpoint:
        shapes = checkpoint.shapes
    shard(model_dir)
    check(model_dir)
    with Checkpoint(model_dir) as checkpoint:
        assert checkpoint.shapes == shapes


def test_missing_surplus_and_misshapen_tensors_are_named(model_dir: Path) -> None:
    check(model_dir)
    sound = tensors(model_dir)
    file = model_dir / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.weight"

    save_file({k: v for k, v in sound.items() if k != name}, file)
    with pytest.raises(ModelError, match=f"lacks {name}"):
        check(model_dir)
    save_file(sound | {"model.layers.0.mlp.up_proj.bias": torch.zeros(160)}, file)
    with pytest.raises(ModelError, match=r"no use here: model\.layers\.0\.mlp\.up_proj\.bias"):
        check(model_dir)
    save_file(sound | {name: torch.zeros(64, 160)}, file)
    with pytest.raises(ModelError, match=r"shape \[64, 160\]; .* \[160, 64\]"):
        check(model_dir)
    save_file({k: v for k, v in sound.items() if "layers.1" not in k}, file)
    with pytest.raises(ModelError, match="and 4 more"):
        check(model_dir)


def test_derived_tensors_may_be_there(model_dir: Path) -> None:
    extra = {
        "lm_head.weight": tensors(model_dir)["model.embed_tokens.weight"].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
    }
    save_file(tensors(model_dir) | extra, model_dir / "model.safetensors")
    check(model_dir)


def test_unusable_files_are_model_errors(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", b"garbage" * 10, whole[: len(whole) // 2]):
        file.write_bytes(content)
        with pytest.raises(ModelError, match="cannot be read"):
            Checkpoint(model_dir)
    file.rename(model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors weights; pickle files are not read"):
        Checkpoint(model_dir)


def test_a_bad_index_is_a_model_error(model_dir: Path) -> None:
    shard(model_dir, {"lm_head.weight": "absent.safetensors"})
    with pytest.raises(ModelError, match=r"lacks the weight files absent\.safetensors"):
        Checkpoint(model_dir)
    index = model_dir / "model.safetensors.index.json"
    outside = json.dumps({"weight_map": {"a": "../model.safetensors"}})
    for content in ("{", "[]", "{}", '{"weight_map": 5}', '{"weight_map": {"a": 5}}', outside):
        index.write_text(content)
        with pytest.raises(ModelError, match=r"index\.json"):
            Checkpoint(model_dir)


def test_the_digest_tells_checkpoints_apart(model_dir: Path, tmp_path: Path) -> None:
    def digest(directory: Path) -> str:
        with Checkpoint(directory) as checkpoint:
            return checkpoint.digest()

    copy = shutil.copytree(model_dir, tmp_path / "copy")
    assert digest(model_dir) == digest(model_dir) == digest(copy)
    changed = tensors(copy)
    changed["model.embed_tokens.weight"] += 1.0
    save_file(changed, copy / "model.safetensors")
    assert digest(copy) != digest(model_dir)
    assert len(digest(copy)) == 64
