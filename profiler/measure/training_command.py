"""One run of the command: started so that its Pythons attach to our socket, and ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from cadenza.policies.core.errors import InputError
from cadenza.profiler.errors import CommandFailedError
from cadenza.profiler.measure.cpu_limits import Limit
from cadenza.sidecar import wire
from cadenza.sidecar.client.bootstrap.run_script import environment
from cadenza.sidecar.client.data.shm_dirs import job_directory

JOB = "SLURM_JOB_ID"
FIRST_OWN_ID = 1_000_000_000
"""Outside an allocation the command gets a job id that Slurm never gives (its ids end at 67,108,863)."""
GRACE_S = 5.0
TAIL_BYTES, TAIL_LINES = 4000, 12
OTHER_ID = 10_000_000
"""More than the largest pid (2^22): between the ids of two commands of the same profiler."""
JOIN = 'echo 0 > "$0" && exec "$@"'


class Run:
    """A started command; ``pids`` are it and all its descendants."""

    def __init__(self, words: Sequence[str], limit: Limit, environ: Mapping[str, str], log: Path) -> None:
        if shutil.which(words[0], path=environ.get("PATH")) is None:
            raise InputError(f"{words[0]}: no such command")
        self._limit = limit
        self._log = log
        self._words = list(words)
        # 0 stands for the writer (cgroup.procs): the shell joins before its exec, so that no process starts outside.
        started = ["/bin/sh", "-c", JOIN, str(limit.quota.entry), *words] if limit.quota else self._words
        try:
            with log.open("ab") as output:
                self._from = output.tell()
                self._process = subprocess.Popen(
                    started,
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise CommandFailedError(f"{words[0]}: {error.strerror or error}") from None

    @property
    def code(self) -> int | None:
        """Return the exit code, None while it runs."""
        return self._process.poll()

    def pids(self) -> list[int]:
        """Return the processes that are alive."""
        with contextlib.suppress(psutil.NoSuchProcess):
            top = psutil.Process(self._process.pid)
            return [top.pid, *(child.pid for child in top.children(recursive=True))]
        return []

    def give(self, cpus: float) -> None:
        """Give it so many CPUs; twice, for what was started while the first time went over the processes."""
        for _ in range(2):
            self._limit.set(cpus, self.pids())

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes, those included that have ended and been waited for."""
        total = 0.0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system + times.children_user + times.children_system
        return total

    def memory_gb(self) -> float:
        """Return the memory of its processes, pages that several share counted once, in GB."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(psutil.Error):
                total += psutil.Process(pid).memory_full_info().pss
        return total / 2**30

    def failure(self, what: str) -> CommandFailedError:
        """Return an error with the end of what the command wrote."""
        with self._log.open("rb") as log:
            log.seek(max(self._from, self._log.stat().st_size - TAIL_BYTES))  # earlier runs have written there too
            tail = log.read().decode(errors="replace").strip()
        head = f"{' '.join(self._words)}: {what}"
        if not tail:
            return CommandFailedError(head)
        lines = tail.splitlines()[-TAIL_LINES:]
        return CommandFailedError(f"{head}; its output is in {self._log} and ends with", *lines)

    def end(self) -> None:
        """End it: SIGTERM to all, and SIGKILL to what is left after a while."""
        alive = set(self.pids())
        if (quota := self._limit.quota) is not None:
            quota.set(None)  # so that it can end quickly
            alive.update(quota.pids())
        processes = []
        for pid in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
                processes.append(psutil.Process(pid))
        for kill, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.send_signal(kill)
            _, processes = psutil.wait_procs(processes, patience_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_S)


def surroundings(
    socket: Path, cpus: float, cache_mb: float | None, environ: Mapping[str, str] = os.environ, number: int = 0
) -> dict[str, str]:
    """Return the command's environment.

    ``CADENZA_PROFILE_CPUS`` says how many CPUs it has at its start and ``CADENZA_PROFILE_CACHE_MB`` how much it may
    cache where that is measured, for scripts that set their loader by them. ``number`` tells commands apart that run
    at the same time outside an allocation.
    """
    found = environment(environ)
    found[wire.SOCKET_ENV] = str(socket)
    found.setdefault(JOB, own_id(number))
    found["CADENZA_PROFILE_CPUS"] = f"{cpus:g}"
    if cache_mb is not None:
        found["CADENZA_PROFILE_CACHE_MB"] = f"{cache_mb:g}"
    return found


def own_id(number: int = 0) -> str:
    """Return a job id for a command; a number gives concurrent commands different ids."""
    return str(FIRST_OWN_ID + number * OTHER_ID + os.getpid())


def own_caches(number: int = 0) -> Path:
    """Return where a command with such an id keeps its caches in memory; one that is killed leaves them there."""
    return job_directory(f"job{own_id(number)}")
