"""Limits by CPU affinity alone, where control groups are not to be had: whole CPUs, no quota, no memory."""

from __future__ import annotations

from cadenza.sidecar.agent.tuning.limits import Pids, Saved, rebind
from cadenza.sidecar.agent.tuning.planner import Grant
from cadenza.sidecar.agent.tuning.topology import listed, parse


class Affinity:
    """sched_setaffinity(2) on every thread of a job that has not chosen its CPUs itself.

    ``found`` is the affinity of the job's first process, ``everywhere`` all CPUs of the host.
    """

    means = "affinity"
    ceiling_mb: int | None = None

    def __init__(self, pids: Pids, saved: Saved, found: frozenset[int], everywhere: frozenset[int]) -> None:
        self._pids = pids
        self._first = parse(saved.setdefault("affinity", listed(found)))
        self.own = frozenset() if self._first == everywhere else self._first
        self._given = parse(saved.get("given", "")) or self._first
        self._saved = saved

    def apply(self, grant: Grant, floor_milli: int) -> None:
        """Bind the job's threads; new processes of a job inherit it, new steps are bound at the next look."""
        del floor_milli
        if grant.milli:
            self._bind(grant.cpus)

    def restore(self) -> None:
        """Bind the threads as they were."""
        self._bind(self._first)

    def _bind(self, cpus: frozenset[int]) -> None:
        rebind(self._pids(), cpus, {self._first, self._given})
        self._given = cpus
        self._saved["given"] = listed(cpus)
