"""python die_with_parent.py PARENT_PID SIGNAL PROGRAM ARGUMENT...

Becomes PROGRAM, which the kernel ends with SIGNAL when the parent dies, even by SIGKILL. Run by
path with `-I -S`: it imports nothing but the standard library and adds about 10 ms.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent_pid, signal_number = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        sys.exit(1)
    os.execv(sys.argv[3], sys.argv[3:])


if __name__ == "__main__":
    main()
