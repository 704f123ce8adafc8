"""How a module of a sister package is run: as a process, by the same interpreter."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """`-P`: a folder named like one of ours, where the user stands, must not take its place."""
    return [sys.executable, "-P", "-m", module, *arguments]
