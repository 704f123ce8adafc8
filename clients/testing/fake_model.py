"""The model that a FakeEngine says it serves: a real directory's text files, or a nameless one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from clients.types import (
    GenerationDefaults,
    LoadReport,
    ModelInfo,
    ServerInfo,
    TokenizerBundle,
)

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)

READY = LoadReport(
    ready=True,
    num_running=0,
    num_waiting=0,
    total_blocks=1024,
    free_blocks=1024,
    cached_blocks=0,
    used_blocks=0,
    num_steps=0,
    prompt_tokens=0,
    generated_tokens=0,
    num_preemptions=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_requests=0,
)

SERVER_INFO = ServerInfo(
    version="0.0.0+fake",
    api_version="1.0",
    device="fake",
    dtype="float32",
    quantization="none",
    kv_cache_dtype="float32",
    op_backends={},
    block_size=16,
    num_blocks=1024,
    max_num_seqs=64,
    max_num_batched_tokens=256,
    start_unix_nanos=1,
    core_starts=1,
    core_pid=0,
    batch_invariant=False,
)


def tokenizer_bundle(model_dir: Path | None) -> TokenizerBundle:
    """Its text files; without a directory a bundle that has none."""
    files = {}
    for name in TOKENIZER_FILES:
        if model_dir is not None and (path := model_dir / name).is_file():
            files[name] = path.read_bytes()
    return TokenizerBundle(_digest(files), files)


def model_info(model: str, bundle: TokenizerBundle) -> ModelInfo:
    """What the bundle's config.json and generation_config.json say, or small round numbers."""
    config = _json_object(bundle.files.get("config.json", b"{}"))
    generation = _json_object(bundle.files.get("generation_config.json", b"{}"))
    max_model_len = _integer(config.get("max_position_embeddings"), 2048)
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    architectures = config.get("architectures")
    return ModelInfo(
        model=model,
        architecture=str(architectures[0]) if isinstance(architectures, list) else "fake",
        vocab_size=_integer(config.get("vocab_size"), 1024),
        max_model_len=max_model_len,
        eos_token_ids=tuple(
            token_id
            for token_id in (eos if isinstance(eos, list) else [eos])
            if isinstance(token_id, int)
        ),
        tokenizer_digest=bundle.digest,
        weights_digest="fake",
        generation_defaults=GenerationDefaults(),
        max_output_tokens=max_model_len,
        max_samples=128,
        created_unix_seconds=1,
        max_queued_samples=1024,
        max_queued_tokens=4_000_000,
    )


def _digest(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _json_object(text: bytes) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("the model's config is not a JSON object")
    return value


def _integer(value: object, default: int) -> int:
    return value if isinstance(value, int) else default
