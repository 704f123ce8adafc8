"""python -m kernels.bench --json PATH: what the CPU kernels reach, beside the limits found here.

Linears and attention on this machine, each beside the memory bandwidth or the arithmetic that
bounds it. Prints a table and writes the same figures as one JSON object of objects. Refuses to
report on anything but the compiled kernels of this machine's form.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from kernels import bench_attention, bench_linear
from kernels.cpu.build import machine_form
from kernels.cpu.library import kernel_form


def main() -> None:
    parser = argparse.ArgumentParser(prog="kernels.bench", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where the figures are written")
    parser.add_argument("--num-threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if kernel_form() != machine_form():
        parser.error(f"the {kernel_form()} form was asked for; this machine's is {machine_form()}")
    figures = bench_linear.measure(arguments.num_threads)
    figures |= bench_attention.measure(arguments.num_threads)
    print(f"{kernel_form()}, {arguments.num_threads} threads")
    for name, row in figures.items():
        print(f"{name:<34} " + "  ".join(f"{unit} {value:.1f}" for unit, value in row.items()))
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
