"""Prefetch for moving jobs: lists of files go from the hosts where a job runs to those where it will run (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.orders import VERSION, Files, FilesOrder, PrefetchOrder
from cadenza.slurm_plugin.service.agents.stop_barrier import Orders

MAX_JOBS = 256
"""Jobs whose lists are passed on; a move is over long before this many others have begun."""


class _Move(NamedTuple):
    """The hosts where a job runs, those where it will run, and its user's id."""

    here: frozenset[str]
    there: tuple[str, ...]
    uid: int


@dataclass
class PrefetchOrders:
    """The hosts of each moving job; the hub's thread owns it."""

    _hosts: dict[JobKey, _Move] = field(default_factory=dict)

    def begin(self, key: JobKey, here: tuple[str, ...], there: tuple[str, ...], uid: int) -> Orders:
        """Return the order for the list of a job's files; one of its hosts lists those of all.

        ``uid``: the job's user by Slurm's word, as which its files are read.
        """
        self._hosts.pop(key, None)
        self._hosts[key] = _Move(frozenset(here), there, uid)
        while len(self._hosts) > MAX_JOBS:
            del self._hosts[next(iter(self._hosts))]
        return [(host, FilesOrder(VERSION, *key)) for host in here[:1]]

    def on_files(self, files: Files) -> Orders:
        """Return the orders to the reading hosts; none for a list from a host that was not asked."""
        move = self._hosts.get(JobKey(files.job, files.restart))
        if move is None or files.host not in move.here:
            return []
        order = PrefetchOrder(VERSION, files.job, files.restart, move.uid, files.paths)
        return [(host, order) for host in move.there]

    def reads(self, key: JobKey, host: str) -> bool:
        """Return whether a host was asked to read a job's files."""
        move = self._hosts.get(key)
        return move is not None and host in move.there
