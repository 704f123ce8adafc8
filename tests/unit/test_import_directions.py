"""Who may import whom, read from the code itself and from what an import really loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {"access", "clients", "engine_service", "http_facade", "kernels", "protos", "traces"}
STDLIB = sys.stdlib_module_names

# Package: what it may import of ours.
MAY_IMPORT = {
    "protos": set[str](),
    "access": set[str](),
    "kernels": set[str](),
    "traces": set[str](),
    "clients": {"protos", "traces"},
    "engine_service": {"access", "protos", "kernels", "traces"},
    "http_facade": {"access", "clients", "traces"},
}
# Package: the only third parties it may import.
ONLY_IMPORTS = {
    "access": {"msgspec", "yaml"},
    "protos": {"grpc", "google"},
    "kernels": {"torch", "triton", "numpy"},
    "traces": {"opentelemetry"},
}
NEVER_IMPORTS = {
    "clients": {"torch", "transformers", "xgrammar", "aiohttp"},
    "engine_service": {"aiohttp"},
    "http_facade": {"torch", "transformers", "xgrammar", "grpc", "google"},
}
# Part of a package: what it may import although its package never does.
EXCEPTIONS = {"clients/bench": {"aiohttp"}}  # the load generator speaks HTTP; nobody imports it
# Plain bookkeeping: any test may run them, in milliseconds.
BOOKKEEPING = ("scheduler", "simulate", "kv_cache_manager", "block_pool", "request")

# Package, or part of one: the extras beside the base that bring what it imports.
EXTRAS = {
    "protos": (),
    "clients": (),
    "clients/bench": ("facade",),
    "clients/text": ("facade",),
    "access": ("facade",),
    "http_facade": ("facade",),
    "engine_service": ("engine",),
    "kernels": ("engine",),
}


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import, wherever in the file it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield node.lineno, node.module or ""


def excepted(path: Path) -> set[str]:
    parts = [part for part in EXCEPTIONS if path.is_relative_to(ROOT / part)]
    return {name for part in parts for name in EXCEPTIONS[part]}


def top_level_imports(path: Path) -> Iterator[tuple[str, str]]:
    for line, module in imports(path):
        yield f"{path.relative_to(ROOT)}:{line}", module.partition(".")[0]


@pytest.mark.parametrize("package", sorted(OURS))
def test_packages_import_each_other_in_one_direction(package: str) -> None:
    wrong = [
        f"{place} imports {name}"
        for path in source_files(package)
        for place, name in top_level_imports(path)
        if name in OURS - MAY_IMPORT[package] - {package}
        or name in NEVER_IMPORTS.get(package, set()) - excepted(path)
        or (package in ONLY_IMPORTS and name not in {*STDLIB, *OURS, *ONLY_IMPORTS[package]})
    ]
    assert wrong == []


def test_nobody_imports_the_tests() -> None:
    for package in OURS:
        for path in source_files(package):
            assert "tests" not in {name for _, name in top_level_imports(path)}, path


def declared(*extras: str) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return {normalised(re.split(r"[<>=!~\[; ]", line)[0]) for line in requirements}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("part", sorted(EXTRAS))
def test_what_a_part_imports_is_declared_as_its_dependency(part: str) -> None:
    dependencies = declared(*EXTRAS[part])
    distributions = packages_distributions()
    nested = [other for other in EXTRAS if other.startswith(f"{part}/")]
    wrong = [
        f"{place} imports {name}"
        for path in source_files(part)
        if not any(path.is_relative_to(ROOT / other) for other in nested)
        for place, name in top_level_imports(path)
        if name not in {*STDLIB, *OURS}
        and not dependencies & {normalised(d) for d in distributions.get(name, [])}
    ]
    assert wrong == []


# ---------------------------------------------------------------- what imports really load


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def loaded_by(modules: list[str], suspects: set[str]) -> set[str]:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1].split(','): importlib.import_module(name)\n"
        "print(*(name for name in sys.argv[2].split(',') if name in sys.modules))"
    )
    return set(python(code, ",".join(modules), ",".join(suspects)).split())


def modules_of(package: str) -> list[str]:
    return [module_name(path) for path in source_files(package) if path.stem != "__main__"]


@pytest.mark.parametrize("package", ["clients", "http_facade"])
def test_client_and_facade_load_no_engine_code(package: str) -> None:
    suspects = {"torch", "xgrammar", "transformers", "engine_service", "kernels", "numpy"}
    assert loaded_by(modules_of(package), suspects) == set()


def test_the_client_loads_no_more_than_it_needs() -> None:
    suspects = {"opentelemetry.sdk", "aiohttp", "tokenizers", "jinja2"}
    assert loaded_by(["clients.engine_client", "clients.sync_client"], suspects) == set()


def test_the_launcher_loads_nothing_of_what_it_starts() -> None:
    suspects = {"grpc", "google.protobuf", "opentelemetry", "tokenizers", "msgspec"}
    assert loaded_by(["clients.cli", "clients.launch.serve"], suspects) == set()


def test_bookkeeping_loads_neither_torch_nor_grpc_nor_asyncio() -> None:
    modules = [f"engine_service.{name}" for name in BOOKKEEPING]
    assert loaded_by(modules, {"torch", "numpy", "grpc", "asyncio", "google.protobuf"}) == set()


def test_the_core_process_loads_neither_grpc_nor_opentelemetry() -> None:
    suspects = {"grpc", "google.protobuf", "opentelemetry", "prometheus_client"}
    assert loaded_by(["engine_service.core_process"], suspects) == set()


def test_a_core_that_starts_loads_nothing_for_grammars_or_imports_of_models() -> None:
    modules = ["core_process", "engine_core", "model_runner", "structured_output"]
    suspects = {"xgrammar", "transformers", "pydantic", "tokenizers", "gguf", "huggingface_hub"}
    assert loaded_by([f"engine_service.{name}" for name in modules], suspects) == set()


def test_every_module_imports_alone() -> None:
    """Each with none of ours loaded, so that one import cannot help the next over a cycle."""
    code = """
import importlib, sys, traceback
names, ours = (argument.split(",") for argument in sys.argv[1:])
broken = []
for name in names:
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] in ours]:
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        broken.append(name)
print(*broken)
"""
    modules = [module for package in sorted(OURS) for module in modules_of(package)]
    forgotten = OURS - {"protos"}  # generated: imports none of ours, and can be loaded only once
    assert python(code, ",".join(modules), ",".join(forgotten)).split() == []


def test_only_the_device_interface_knows_what_it_runs_on() -> None:
    """The walk from scheduler to kernel is the same for all devices."""
    knowing = {"compute_device", "cuda_device", "flags", "config"}
    for path in source_files("engine_service"):
        if path.stem in knowing or path.stem.startswith("bench_"):
            continue
        names = {
            name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            for name in (
                getattr(node, "attr", ""),
                getattr(node, "id", ""),
                node.value if isinstance(node, ast.Constant) else "",
            )
            if isinstance(name, str)
        }
        assert not {"cuda", "is_cuda"} & names, path
