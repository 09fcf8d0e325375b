"""How a grant is put into force on one job: the protocol, and what its implementations have in common."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeAlias

from cadenza.sidecar.agent.errors import AgentError
from cadenza.sidecar.agent.tuning.planner import Grant

PERIOD_US = 100_000
MB = 1 << 20
UNLIMITED = 1 << 60
"""More than this is no limit: version 1 has the largest page-aligned number in its place."""

GONE = frozenset({errno.ENOENT, errno.ENODEV})

Pids: TypeAlias = Callable[[], frozenset[int]]
Saved: TypeAlias = dict[str, str]
"""What Slurm had set, by file, as it was before the first change: what ``restore`` goes back to."""


class TuningError(AgentError):
    """The kernel refuses a limit; the admin must look at the agent's rights on the named file."""


class Limits(Protocol):
    """One job's limits on this host."""

    means: str
    """What enforces them, for the report."""
    own: frozenset[int]
    """CPUs that Slurm bound the job to; empty: any."""
    ceiling_mb: int | None
    """Slurm's hard limit of memory; None: none."""

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Make it so, also for processes and steps that have come since; raise TuningError."""
        ...

    def restore(self) -> None:
        """Go back to what Slurm had set; what is gone by now needs nothing. Raises TuningError."""
        ...


def put(path: Path, text: str) -> None:
    """Write a control file unless it says so already; raise TuningError naming it."""
    try:
        if path.read_text(encoding="ascii").strip() != text:
            path.write_text(text + "\n", encoding="ascii")
    except OSError as error:
        if error.errno in GONE:
            return  # the job has ended, or the controller is not there
        raise TuningError(f"{path}: {text!r} cannot be written: {error.strerror}") from None


def put_bandwidth(quota: Path, burst: Path, limit: str, most_us: int) -> None:
    """Write a CPU bandwidth, of which as much as one period's may be saved for a later one (kernel 5.14 and later).

    A training step needs its CPUs in bursts: with a quota of what it uses on average it would be throttled in each.
    """
    if text_of(quota) != limit:
        put(burst, "0")  # the kernel takes no quota below the burst that is set
        put(quota, limit)
    put(burst, str(most_us))


def text_of(path: Path) -> str:
    """Return a control file's text; "" when it cannot be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def megabytes(text: str) -> int | None:
    """Return a limit in bytes as MB; None when there is none."""
    return int(text) // MB if text.isdigit() and int(text) < UNLIMITED else None


def rebind(pids: Iterable[int], cpus: frozenset[int], known: Iterable[frozenset[int]]) -> None:
    """Move threads to CPUs whose affinity is one of those that Slurm or we gave; others chose theirs themselves."""
    masks = frozenset(known)
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
