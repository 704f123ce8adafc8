"""What is no Python but needed at run time is in the wheel, too."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.unit.test_repository import ROOT, repository_files

PACKAGES = ("access", "clients", "engine_service", "http_facade", "kernels", "protos", "traces")


@pytest.mark.slow
def test_the_wheel_has_every_file_of_the_packages(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for path in repository_files():
        place = source / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    files = {str(path.relative_to(ROOT)) for path in repository_files()}
    needed = {name for name in files if name.split("/")[0] in PACKAGES}
    missing = {name for name in needed - packed if not name.endswith((".md", ".gitignore"))}
    assert missing == set()
