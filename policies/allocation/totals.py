"""A cluster as one machine, and shares of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cadenza.policies.allocation.demand import Need
from cadenza.policies.allocation.problem import Server
from cadenza.policies.core.model import Job
from cadenza.policies.ordering.sort_keys import waited

STARVING_S = 1000 * 3600.0
"""A job that has not run for longer goes first (Synergy's published simulator)."""


@dataclass(frozen=True, slots=True)
class Totals:
    """What all servers have together; memory in MB."""

    gpus: int
    cpus: int
    memory_mb: int
    kinds: tuple[Server, ...]
    """One server of each kind."""

    @classmethod
    def of(cls, servers: Sequence[Server]) -> Totals:
        """Return the totals of servers."""
        return cls(
            sum(server.gpus for server in servers),
            sum(server.cpus for server in servers),
            sum(server.memory_mb for server in servers),
            tuple(dict.fromkeys(server._replace(name="") for server in servers)),
        )

    def shares(self, gpus: int, need: Need) -> tuple[float, float, float]:
        """Return which part of all GPUs, CPUs and memory a job wants."""
        return gpus / max(self.gpus, 1), need.cpus / max(self.cpus, 1), need.memory_mb / max(self.memory_mb, 1)


def starves(job: Job, now_s: float) -> bool:
    """Return whether a job has waited past the bound since it came or last ran."""
    return waited(job, now_s) > STARVING_S
