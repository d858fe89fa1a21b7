"""Become a server that dies with its parent: launch.py PARENT UID GID PROGRAM [ARGUMENT…]

A program of its own instead of subprocess's `preexec_fn`, which may deadlock in a process that
has threads, as a test process does. A negative UID means: stay who you are.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, uid, gid = (int(word) for word in sys.argv[1:4])
    program = sys.argv[4:]
    if uid >= 0:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":
        # After the change of user, which clears it.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the parent died before its death could be watched")
    # Python ignores these for itself, and a program inherits what is ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(program[0], program)


if __name__ == "__main__":
    main()
