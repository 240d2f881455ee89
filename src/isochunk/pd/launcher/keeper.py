"""Runs a command and leaves nothing of it behind. Started as a script, so that it stays small.

vLLM's server starts engine cores and workers. Whatever way the server ends, or if the launcher
itself is killed, the keeper ends all processes that came from it, then itself with the server's
status. A first SIGTERM or SIGINT goes to the server, a second one ends everything at once.

Usage: keeper.py LAUNCHER_PID GRACE_S COMMAND...
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2


def keep(launcher_pid: int, grace_s: float, command: list[str]) -> int:
    """Run a command until it ends or is stopped; returns its status as ``Popen`` gives it."""
    stops: list[int] = []

    def on_signal(signum: int, _: FrameType | None) -> None:
        stops.append(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, on_signal)
    if sys.platform == "linux":
        # Orphans become our children, also those that left the process group.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command)
    except OSError as error:
        print(f"can't run {command[0]}: {error.strerror}", flush=True)
        return 127
    deadline = float("inf")
    while child.poll() is None and len(stops) < 2 and time.monotonic() < deadline:
        if os.getppid() != launcher_pid and not stops:
            stops.append(signal.SIGTERM)  # the launcher is gone
        if stops and deadline == float("inf"):
            child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_S)
    if child.poll() is None:
        child.kill()
    status = child.wait()
    _kill_descendants()
    return status


def _kill_descendants() -> None:
    while found := psutil.Process().children(recursive=True):
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1.0)


def _end_as(status: int) -> None:
    """End with a child's status: by the same signal, if it was one."""
    if status >= 0:
        sys.exit(status)
    with contextlib.suppress(OSError):  # SIGKILL's handler can't be set
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


if __name__ == "__main__":
    _end_as(keep(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
