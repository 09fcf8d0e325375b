"""Which hosts read the files of which moving job: lists of files from where it runs go to where it will (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.orders import VERSION, Files, FilesOrder, PrefetchOrder
from cadenza.slurm_plugin.service.agents.stop_barrier import Orders

KEPT = 256
"""Jobs whose lists are passed on; a move is over long before as many others have begun."""


@dataclass
class PrefetchOrders:
    """The hosts by job; the hub's thread owns it."""

    _hosts: dict[JobKey, tuple[frozenset[str], tuple[str, ...]]] = field(default_factory=dict)

    def begin(self, key: JobKey, here: tuple[str, ...], there: tuple[str, ...]) -> Orders:
        """Return the orders to those who know a job's files; one of its hosts knows those of all."""
        self._hosts.pop(key, None)
        self._hosts[key] = (frozenset(here), there)
        while len(self._hosts) > KEPT:
            del self._hosts[next(iter(self._hosts))]
        return [(host, FilesOrder(VERSION, *key)) for host in here[:1]]

    def hear(self, files: Files) -> Orders:
        """Return the orders to those who are to read; none for a list that nobody asked its host for."""
        here, there = self._hosts.get(JobKey(files.job, files.restart), (frozenset(), ()))
        if files.host not in here:
            return []
        order = PrefetchOrder(VERSION, files.job, files.restart, files.uid, files.paths)
        return [(host, order) for host in there]
