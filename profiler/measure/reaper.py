"""Ends a command when the profiler ends, however that happens: a process of its own waits for it (stdlib only).

SIGKILL leaves a profiler no time to end what it has started. The process here waits for the end of a pipe that only the
profiler holds open, and then kills what is in the command's cgroup, and what has the profiler's socket in its
environment: descendants inherit that through new sessions and after their parents' end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

SOCKET_ENV = "CADENZA_SOCKET"
LOOK_S = 0.05
MOST_LOOKS = 200
CALM_LOOKS = 2
"""So often in a row there must be nothing left: a process that is just starting is seen by its new name only."""
KILL_S = 30.0


class Reaper:
    """Holds all commands that are told of ``socket``, and those in ``cgroup``, until closed."""

    def __init__(self, socket: Path, cgroup: Path | None = None, caches: Path | None = None) -> None:
        """Start the process; ``caches`` are files in memory that the commands leave behind when they are killed."""
        words = [sys.executable, "-I", "-S", __file__, str(socket), *map(str, filter(None, (caches, cgroup)))]
        # A Ctrl-C reaches the whole process group of the terminal, and this process must outlive it.
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Kill what is left, and wait until it is gone."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)


def marked(marker: bytes, proc: Path = Path("/proc")) -> set[int]:
    """Return the processes with this NAME=VALUE in the environment that they were started with."""
    found = set()
    for folder in proc.iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and marker in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
    return found


def inside(cgroup: Path) -> set[int]:
    """Return the processes in a cgroup."""
    with contextlib.suppress(OSError):
        return set(map(int, (cgroup / "cgroup.procs").read_text(encoding="ascii").split()))
    return set()


def end(socket: str, leftovers: list[Path]) -> None:
    """Kill until nothing is left, and remove the cgroup among ``leftovers`` and the folders."""
    marker = f"{SOCKET_ENV}={socket}".encode()
    calm = 0
    for _ in range(MOST_LOOKS):
        found = marked(marker).union(*map(inside, leftovers))
        calm = 0 if found else calm + 1
        if calm == CALM_LOOKS:
            break
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        threading.Event().wait(LOOK_S)
    for folder in leftovers:
        with contextlib.suppress(OSError):
            folder.rmdir()  # a cgroup's files are not removed one by one
        if not (folder / "cgroup.procs").exists():
            shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(Path(socket).parent, ignore_errors=True)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1], [Path(text) for text in sys.argv[2:]])
