"""Which threads of one machine give way to which: those that carry tokens to those that make them,
and those that prepare what a new request needs to all.

A thread that wakes up normally takes the processor from one that computes. The step loop's threads
wait for each other some hundred times a step, so that each such moment stops both. Woken as a batch
job (sched(7): SCHED_BATCH) a thread waits for its turn, a few milliseconds at most; on a machine
with a processor to spare there is no difference.

A low priority alone doesn't help a step: its thread, awake again, may find the processor taken for
the rest of somebody's turn, however low that one's share of turns. Only what runs as SCHED_IDLE is
thrown off at once; it gets the moments in which nobody else wants the processor.
"""

from __future__ import annotations

import os
import sys
import threading


def wake_without_preempting() -> None:
    """For this process from now on: call it before there are other threads."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def compute_as_usual() -> None:
    """For a process that its parent's policy is not meant for."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def lower_priority() -> None:
    """For this thread from now on, and for processes that it starts: a tenth of a processor that
    others want, too."""
    if sys.platform == "linux":  # where a thread has a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def give_way_to_all() -> None:
    """For this thread from now on, and for processes that it starts."""
    if sys.platform == "linux":
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
