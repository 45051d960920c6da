"""Run by path in any Python: `under.py PARENT ARGUMENT…` becomes `python ARGUMENT…`, and ends when its parent does.

It leads a session of its own, so that it and all that it starts can be ended at once. Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = int(sys.argv[1])
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # kept across exec
    if os.getppid() != parent:  # it ended before the kernel was told
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
