"""One server with the embedded model for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.serving import Served, serve


@pytest.fixture(scope="session")
def served(embedded_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(embedded_model_dir, tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="session")
def tok(embedded_model_dir: Path) -> PreTrainedTokenizerBase:
    """The reference tokenizer, independent of ours."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(embedded_model_dir)
    return tokenizer
