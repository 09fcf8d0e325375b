"""Count of the jobs of a simulation that wait without GPUs, by what they ask for, kept as jobs change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import TypeAlias

from cadenza.policies.core.idle_gpus import Wanted
from cadenza.policies.core.model import JobKey
from cadenza.policies.simulator.job import SimJob

Asked: TypeAlias = tuple[Wanted, int]
"""A job's rules for nodes, and the number of its GPUs."""


class WaitingCount:
    """Numbers of waiting jobs as of the last update."""

    def __init__(self) -> None:
        self._asked: Counter[Asked] = Counter()
        self._seen = 0

    def update(self, changed: list[SimJob], live: Mapping[JobKey, SimJob], *, clear: bool = False) -> None:
        """Look at the jobs that were added to a list since the last time, and clear it if so asked."""
        for job in changed[self._seen :]:
            waits, trace = not job.running and live.get(job.key) is job, job.trace
            asks = (Wanted(trace.partition, trace.gpu_type, trace.barred), job.gpus) if waits else None
            if asks == job.counted:
                continue
            if asks is not None:
                self._asked[asks] += 1
            if job.counted is not None:
                self._asked[job.counted] -= 1
            job.counted = asks
        if clear:
            changed.clear()
        self._seen = len(changed)

    def asked(self) -> list[Asked]:
        """Return the kinds of requests of waiting jobs, each once."""
        return [asked for asked, count in self._asked.items() if count]


def narrowest(asked: Iterable[Asked], most: int) -> dict[Wanted, int]:
    """Return the smallest number of GPUs up to ``most`` that jobs ask for, by their rules for nodes."""
    found: dict[Wanted, int] = {}
    for wanted, gpus in asked:
        if gpus <= most and gpus < found.get(wanted, inf):
            found[wanted] = gpus
    return found
