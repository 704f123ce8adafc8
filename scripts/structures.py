"""Writes the module list of docs/structures.md from the modules' docstrings; `--check` compares."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "structures.md"
MARKER = "<!-- from here on written by scripts/structures.py -->\n"
PACKAGES = (
    "protos",
    "engine_service",
    "kernels",
    "http_facade",
    "clients",
    "access",
    "traces",
)


def first_sentence(module: Path) -> str:
    docstring = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def module_list() -> str:
    lines = [MARKER]
    for package in PACKAGES:
        lines.append(f"\n### {package}/\n\n")
        for module in sorted((ROOT / package).rglob("*.py")):
            sentence = first_sentence(module)
            if sentence and "_pb2" not in module.name:
                name = module.relative_to(ROOT).as_posix()
                lines.append(f"- `{name}`: {sentence}\n")
    return "".join(lines)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    written = page.split(MARKER)[0] + module_list()
    if "--check" not in sys.argv:
        PAGE.write_text(written, encoding="utf-8")
    elif page != written:
        sys.exit("docs/structures.md is behind the code: run `make docs`")


if __name__ == "__main__":
    main()
