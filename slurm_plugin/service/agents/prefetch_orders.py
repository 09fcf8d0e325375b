"""Prefetch for moving jobs: lists of files go from the hosts where a job runs to those where it will run (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.orders import VERSION, Files, FilesOrder, PrefetchOrder
from cadenza.slurm_plugin.service.agents.stop_barrier import Orders

MAX_JOBS = 256
"""Jobs whose lists are passed on; a move is over long before this many others have begun."""


@dataclass
class PrefetchOrders:
    """The hosts of each moving job; the hub's thread owns it."""

    _hosts: dict[JobKey, tuple[frozenset[str], tuple[str, ...]]] = field(default_factory=dict)

    def begin(self, key: JobKey, here: tuple[str, ...], there: tuple[str, ...]) -> Orders:
        """Return the order for the list of a job's files; one of its hosts lists those of all."""
        self._hosts.pop(key, None)
        self._hosts[key] = (frozenset(here), there)
        while len(self._hosts) > MAX_JOBS:
            del self._hosts[next(iter(self._hosts))]
        return [(host, FilesOrder(VERSION, *key)) for host in here[:1]]

    def on_files(self, files: Files) -> Orders:
        """Return the orders to the reading hosts; none for a list from a host that was not asked."""
        here, there = self._hosts.get(JobKey(files.job, files.restart), (frozenset(), ()))
        if files.host not in here:
            return []
        order = PrefetchOrder(VERSION, files.job, files.restart, files.uid, files.paths)
        return [(host, order) for host in there]
