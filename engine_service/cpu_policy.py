"""Which threads of one machine give way to which: those that carry tokens to those that make them.

A thread that wakes up normally takes the processor from one that computes. The step loop's threads
wait for each other some hundred times a step, so that each such moment stops both. Woken as a batch
job (sched(7): SCHED_BATCH) a thread waits for its turn, a few milliseconds at most; on a machine
with a processor to spare there is no difference.
"""

from __future__ import annotations

import os
import sys


def wake_without_preempting() -> None:
    """For this process from now on: call it before there are other threads."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compute_as_usual() -> None:
    """For a process that its parent's policy is not meant for."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
