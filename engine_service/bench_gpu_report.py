"""What `bench_gpu` found: a JSON file that is whole after every item, and a table.

    {"device": {...}, "parts": {PART: {ITEM: {FIGURE: NUMBER}}}, "failures": {PART: {ITEM: WHY}}}

Rates are put beside what the same run found to be this GPU's limits, and the engine's output
tokens a second beside those of transformers for the same load:

    of_copy           gb_s / the copy's           of_matmul   tflop_s / the matrix product's
    of_transformers   output_tokens_s / theirs
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

# Figure: the fraction made of it, and which figure of which item it is a fraction of.
_LIMITS: Final = {
    "gb_s": ("of_copy", "copy"),
    "tflop_s": ("of_matmul", "matmul"),
}
_PEERS: Final = {"engine-1b": "transformers-1b", "engine-8b": "transformers-8b"}

Figures = dict[str, float]


class Report:
    """May be written to by several threads."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.device: Mapping[str, object] = {}
        self.parts: dict[str, dict[str, Figures]] = {}
        self.failures: dict[str, dict[str, str]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, part: str, item: str, figures: Figures) -> None:
        with self._lock:
            self.parts.setdefault(part, {})[item] = figures
            self._write()

    def fail(self, part: str, item: str, why: str) -> None:
        with self._lock:
            self.failures.setdefault(part, {})[item] = why
            self._write()

    def write(self) -> None:
        with self._lock:
            self._write()

    def _write(self) -> None:
        """All at once, so that who ends in between leaves a whole file."""
        content = {
            "device": self.device,
            "parts": self.with_fractions(),
            "failures": self.failures,
        }
        beside = self._path.with_name(self._path.name + ".new")
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(beside, self._path)

    def with_fractions(self) -> dict[str, dict[str, Figures]]:
        return {
            part: {item: figures | self._fractions(part, item) for item, figures in items.items()}
            for part, items in self.parts.items()
        }

    def _fractions(self, part: str, item: str) -> Figures:
        figures = self.parts[part][item]
        fractions: Figures = {}
        for figure, (name, limit) in _LIMITS.items():
            of = self.parts.get("limits", {}).get(limit, {}).get(figure)
            if part != "limits" and figure in figures and of:
                fractions[name] = figures[figure] / of
        peers = self.parts.get(_PEERS.get(part, ""), {}).get(item, {}).get("output_tokens_s")
        if peers and "output_tokens_s" in figures:
            fractions["of_transformers"] = figures["output_tokens_s"] / peers
        return fractions

    def table(self) -> str:
        lines = [", ".join(f"{name} {value}" for name, value in self.device.items())]
        for part, items in self.with_fractions().items():
            lines += ["", part]
            lines += [f"  {item:<50} {_told(figures)}" for item, figures in items.items()]
        for part, failed in self.failures.items():
            lines += ["", f"{part}: failed"]
            lines += [f"  {item:<50} {why}" for item, why in failed.items()]
        return "\n".join(lines)


def _told(figures: Figures) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
