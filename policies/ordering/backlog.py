"""A long queue in a fixed order, kept from round to round by what changed in it.

A site's backlog can be a hundred times what runs. Snapshots share the records of unchanged jobs, so what is new can
be told by identity, and only that is looked at and sorted in. The result is the same as from scratch.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from typing import Any

from cadenza.policies.core.model import Job


class Backlog:
    """The jobs of the last snapshot that passed ``wanted``, in order of ``key``, which no job ever changes."""

    def __init__(self, key: Callable[[Job], Any], wanted: Callable[[Job], bool]) -> None:
        self._key = key
        self._wanted = wanted
        self._seen: tuple[Job, ...] = ()
        """Kept so that no other job can get the identity of one of these."""
        self._ids: set[int] = set()
        self._ordered: list[Job] = []
        self._answer: tuple[Job, ...] = ()
        self.running: list[Job] = []
        """Those of them that have GPUs."""

    def ordered(self, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
        """Return the wanted ones among ``jobs`` in order."""
        if jobs is self._seen:
            return self._answer
        now, before = set(map(id, jobs)), self._ids
        kept = self._ordered if before <= now else [job for job in self._ordered if id(job) in now]
        new = [job for job in jobs if id(job) not in before and self._wanted(job)]
        if len(new) > len(kept) // 4:
            kept = sorted([*kept, *new], key=self._key)
        else:
            for job in new:
                insort(kept, job, key=self._key)
        self.running = [*(job for job in self.running if id(job) in now), *(job for job in new if job.placement)]
        self._seen, self._ids, self._ordered, self._answer = jobs, now, kept, tuple(kept)
        return self._answer
