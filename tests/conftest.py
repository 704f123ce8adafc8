"""What every kind of test shares: the embedded model, and tiny random ones of each architecture."""

from __future__ import annotations

import os

# Before anything imports torch: a test runs beside others and beside the processes it starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["FIRSTTOKEN_TRACE_DIR"] = "none"  # traces of tests go where the test says
# Triton's kernels run in its interpreter where there is no GPU: chosen before triton is imported.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"

import atexit
import json
import shutil
import tempfile
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import HealthCheck, settings

from engine_service.model_store import cache_dir, resolve_model


def _use_own_cache() -> None:
    """The user's models and kernels; what is packed of tiny models is thrown away."""
    own = Path(tempfile.mkdtemp(prefix="firsttoken-cache-"))
    atexit.register(shutil.rmtree, own, ignore_errors=True)  # a link is removed, not followed
    for name in ("models", "kernels"):
        shared = cache_dir() / name
        shared.mkdir(parents=True, exist_ok=True)
        (own / name).symlink_to(shared.resolve())
    os.environ["FIRSTTOKEN_CACHE"] = str(own)


_use_own_cache()

# What an example takes depends on what else the machine does.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class MakeTinyModel(Protocol):
    """`arch` is llama, mistral, qwen2 or qwen3; overrides are fields of its transformers config.

    Equal arguments give the same directory, which must not be changed.
    """

    def __call__(self, arch: str, **overrides: object) -> Path: ...


@pytest.fixture(scope="session")
def embedded_model_dir() -> Path:
    """SmolLM2-135M-Instruct as imported into the user's cache."""
    return resolve_model(None)


@pytest.fixture(scope="session")
def tiny_model_dir(
    embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> MakeTinyModel:
    """A factory of tiny random models that can be served: they have the embedded tokenizer."""
    made: dict[str, Path] = {}

    def make(arch: str, **overrides: object) -> Path:
        key = json.dumps([arch, overrides], sort_keys=True)
        if key not in made:
            directory = tmp_path_factory.mktemp(f"tiny-{arch}")
            _save_tiny_model(directory, arch, overrides)
            for name in TOKENIZER_FILES:
                shutil.copy(embedded_model_dir / name, directory / name)
            made[key] = directory
        return made[key]

    return make


def _save_tiny_model(directory: Path, arch: str, overrides: dict[str, object]) -> None:
    # Here, not above: most tests need neither.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, object] = {
        "vocab_size": 49152,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,  # wide, so that greedy choices are not near-ties
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config = AutoConfig.for_model(arch, **{**fields, **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(20)
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=torch.float32
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases start as 0 and norms as 1: they would not matter
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.eval().save_pretrained(directory)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test may take longer than others, on a machine that is slow itself."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
