"""Our package `kernels` must not pass for the one of that name that transformers looks for."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_package_is_a_docstring_only() -> None:
    (statement,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(statement, ast.Expr)
    assert isinstance(statement.value, ast.Constant)
    assert isinstance(statement.value.value, str)


def test_transformers_does_not_take_it_for_the_other_package() -> None:
    code = (
        "import kernels, transformers.integrations.hub_kernels;"
        "from transformers.utils import is_kernels_available;"
        "print(kernels.__file__, is_kernels_available())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == [str(ROOT / "kernels" / "__init__.py"), "False"]


def test_our_version_is_not_one_that_transformers_would_accept() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version = tuple(int(part) for part in project["version"].split("."))
    assert not (0, 18, 2) <= version < (0, 19, 0)


def test_the_other_package_is_not_installed_and_transformers_is_new_enough() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "requirements.lock").read_text(), re.M))
    assert "kernels" not in pins
    assert tuple(int(part) for part in pins["transformers"].split(".")[:2]) >= (5, 24)
