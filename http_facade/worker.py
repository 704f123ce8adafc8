"""`python -m http_facade.worker INDEX DIRECTORY FLAG...`: one of several facades on one port.

Started by `workers.py`. In DIRECTORY all workers keep their metrics, each under its INDEX: one that
takes a dead one's place goes on counting where that one was.
"""

from __future__ import annotations

import os
import sys
import warnings

from http_facade.flags import build_parser, config_from_args
from http_facade.process import run_facade


def main() -> int:
    index, directory, *flags = sys.argv[1:]
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = directory  # before the library is imported
    from prometheus_client import values

    # A label that one worker removes may be another's.
    warnings.filterwarnings("ignore", "Removal of labels has not been implemented")
    values.ValueClass = values.MultiProcessValue(lambda: index)  # type: ignore[no-untyped-call]
    return run_facade(config_from_args(build_parser().parse_args(flags)), shares_port=True)


if __name__ == "__main__":
    sys.exit(main())
