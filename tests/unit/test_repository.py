"""The repository names nothing of the machine it was written on, and its lock is whole."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]

# In pieces, or this file would find itself.
_MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:" + "|".join(["wo" + "rk", "ro" + "ot"]) + r")/")
_REGISTRY = re.compile(
    "|".join(
        ["pypi" + r"\.org", "pythonhosted" + r"\.org", "npmjs" + r"\.org", "debian" + r"\.org"]
    )
)


def repository_files() -> list[Path]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_names_a_registry_or_a_path_of_this_machine() -> None:
    wrong = []
    for path in repository_files():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            if _MACHINE_PATH.search(line) or _REGISTRY.search(line):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert wrong == []


def test_every_declared_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [
        line for line in (ROOT / "requirements.lock").read_text().splitlines() if line[0] != "#"
    ]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)  # no build suffix either
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines}
    extras = project["optional-dependencies"].values()
    requirements = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in requirements}
    assert names - pinned - {"firsttoken"} == set()


def test_every_package_is_typed_and_data_files_are_shipped() -> None:
    packages = ("access", "clients", "engine_service", "http_facade", "kernels", "protos", "traces")
    for package in packages:
        assert (ROOT / package / "py.typed").is_file()
