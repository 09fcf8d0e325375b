"""Enforcement of a grant on one job: the protocol, its common parts, and enforcement by CPU affinity alone."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

from cadenza.policies.core.text import ranges
from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.ipc.processes import text_of
from cadenza.sidecar.agent.tuning.planner import Grant
from cadenza.sidecar.agent.tuning.topology import parse

PERIOD_US = 100_000
MB = 1 << 20
UNLIMITED = 1 << 60
"""Larger values mean no limit: version 1 shows the largest page-aligned number then."""

GONE = frozenset({errno.ENOENT, errno.ENODEV})

Pids: TypeAlias = Callable[[], frozenset[int]]
Saved: TypeAlias = dict[str, str]
"""Slurm's values by file, from before the first change, which ``restore`` writes back."""


class TuningError(AgentError):
    """The kernel refuses a limit; the admin must look at the agent's rights on the named file."""


class Limits(Protocol):
    """One job's limits on this host."""

    means: str
    """Means of enforcement, for the report."""
    own: frozenset[int]
    """CPUs that Slurm bound the job to; empty: any."""
    ceiling_mb: int | None
    """Slurm's hard limit of memory; None: none."""

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Enforce a grant, also on processes and steps that have come since; raise TuningError."""
        ...

    def restore(self) -> None:
        """Restore Slurm's values wherever their files still exist; raise TuningError."""
        ...


def put(path: Path, text: str) -> None:
    """Write a control file unless it has that text already; raise TuningError naming it."""
    try:
        if path.read_text(encoding="ascii").strip() != text:
            path.write_text(text + "\n", encoding="ascii")
    except OSError as error:
        if error.errno in GONE:
            return  # the job has ended, or the controller is not there
        raise TuningError(f"{path}: {text!r} cannot be written: {error.strerror}") from None


def put_bandwidth(quota: Path, burst: Path, limit: str, most_us: int) -> None:
    """Write a CPU bandwidth; up to one period of it may be saved for a later one (kernel 5.14 and later)."""
    if text_of(quota) != limit:
        put(burst, "0")  # the kernel takes no quota below the burst that is set
        put(quota, limit)
    # A training step needs its CPUs in bursts: a quota of its average use alone would throttle each burst.
    put(burst, str(most_us))


def megabytes(text: str) -> int | None:
    """Return a limit in bytes as MB; None if there is none."""
    return int(text) // MB if text.isdigit() and int(text) < UNLIMITED else None


def rebind(pids: Iterable[int], cpus: frozenset[int], earlier: Iterable[frozenset[int]]) -> None:
    """Move threads to CPUs if their affinity is one that Slurm or the agent gave; other threads chose their own."""
    masks = frozenset(earlier)
    # sched_setaffinity(2) acts on one thread: the others keep what they had.
    for thread in _threads(pids):
        with contextlib.suppress(OSError):  # it has ended, or its group leaves it none of these
            mask = frozenset(os.sched_getaffinity(thread))
            if mask != cpus and mask in masks:
                os.sched_setaffinity(thread, cpus)


def _threads(pids: Iterable[int]) -> Iterable[int]:
    """Yield the threads of processes."""
    for pid in pids:
        with contextlib.suppress(OSError):
            yield from (int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())


class Affinity:
    """Whole CPUs without quota or memory limits, where control groups cannot be written.

    It calls sched_setaffinity(2) on every thread of a job that has not chosen its CPUs itself. ``before`` is the
    affinity of the job's first process, ``everywhere`` all CPUs of the host.
    """

    means = "affinity"
    ceiling_mb: int | None = None

    def __init__(self, pids: Pids, saved: Saved, before: frozenset[int], everywhere: frozenset[int]) -> None:
        self._pids = pids
        self._first = parse(saved.setdefault("affinity", ranges(before)))
        self.own = frozenset() if self._first == everywhere else self._first
        self._given = parse(saved.get("given", "")) or self._first
        self._saved = saved

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Bind the job's threads; new processes of a job inherit it, new steps are bound at the next check."""
        del floor_milli
        if grant.milli:
            self._bind(grant.cpus)

    def restore(self) -> None:
        """Bind the threads as they were."""
        self._bind(self._first)

    def _bind(self, cpus: frozenset[int]) -> None:
        rebind(self._pids(), cpus, {self._first, self._given})
        self._given = cpus
        self._saved["given"] = ranges(cpus)
