"""Free resources of servers while jobs are packed onto them; servers are named by their position in the case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from cadenza.policies.allocation.demand import JobDemand, Need, Spots
from cadenza.policies.allocation.problem import Server
from cadenza.policies.core.model import Job, Placement, Share
from cadenza.policies.ordering.ranking import waited


class FreeResources:
    """Free GPUs, CPUs and memory (MB) of each server."""

    __slots__ = ("_single", "changes", "cpus", "first", "gpus", "kind", "kinds", "lowest", "memory_mb", "servers")

    def __init__(self, servers: Sequence[Server]) -> None:
        self.servers = servers
        self.gpus = [server.gpus for server in servers]
        self.cpus = [server.cpus for server in servers]
        self.memory_mb = [server.memory_mb for server in servers]
        number: dict[tuple[int, int, int, str], int] = {}
        self.kind = [number.setdefault(server[1:], len(number)) for server in servers]
        """Each server's position in ``kinds``."""
        self.kinds = [Server("", *key) for key in number]
        self.first = 0
        """No server before this one has a free GPU."""
        self.changes = 0
        self.lowest = len(servers)
        """No server before this one has ever got anything back."""
        self._single: list[Spots] = [((at, 1),) for at in range(len(servers))]

    def first_fit(self, ask: JobDemand) -> Spots | None:
        """Take what is asked from the first servers that have it, GPU by GPU; None when it does not fit.

        Synergy's simulator without consolidation: each GPU, in order of servers, that its server can supply.
        """
        if ask.gpus == 1:
            return self._first_fit_one(ask)
        spots = []
        missing = ask.gpus
        for server in range(self.first, len(self.gpus)):
            count = self.most(ask, server, missing)
            if count:
                spots.append((server, count))
                missing -= count
                if not missing:
                    self.take(ask, spots)
                    return tuple(spots)
        return None

    def _first_fit_one(self, ask: JobDemand) -> Spots | None:
        """Do the same for one GPU; what has not fitted on a server will not until something there is given back."""
        gpus, kind, take = self.gpus, self.kind, ask.take
        if ask.seen != self.changes:
            ask.seen = self.changes
            ask.start = min(ask.start, self.lowest)
        at = max(self.first, ask.start)
        while at < len(gpus):
            if gpus[at] and (table := take[kind[at]]):
                cpus, memory_mb = table[1]
                if self.cpus[at] >= cpus and self.memory_mb[at] >= memory_mb:
                    ask.start = at
                    self.cpus[at] -= cpus
                    self.memory_mb[at] -= memory_mb
                    gpus[at] -= 1
                    if not gpus[at]:
                        self._skip_full()
                    return self._single[at]
            at += 1
        ask.start = at
        return None

    def most(self, ask: JobDemand, server: int, limit: int) -> int:
        """Return how many GPUs of what is asked a server can supply, at most ``limit``."""
        table = ask.take[self.kind[server]]
        cpus, memory_mb = self.cpus[server], self.memory_mb[server]
        count = min(limit, self.gpus[server], len(table) - 1) if table else 0
        while count and (table[count].cpus > cpus or table[count].memory_mb > memory_mb):
            count -= 1
        return count

    def take(self, ask: JobDemand, spots: Sequence[tuple[int, int]]) -> None:
        """Take what is asked at these spots, whether it is there or not."""
        for server, count in spots:
            need = ask.take[self.kind[server]][count]
            self.gpus[server] -= count
            self.cpus[server] -= need.cpus
            self.memory_mb[server] -= need.memory_mb
        self._skip_full()

    def change(self, old: JobDemand, new: JobDemand, spots: Spots) -> None:
        """Let a job hold other CPUs and memory where it is, whether they are there or not."""
        self.changes += 1
        self.lowest = min(self.lowest, spots[0][0])
        for server, count in spots:
            has, gets = old.take[self.kind[server]][count], new.take[self.kind[server]][count]
            self.cpus[server] += has.cpus - gets.cpus
            self.memory_mb[server] += has.memory_mb - gets.memory_mb

    def need(self, ask: JobDemand, server: int, count: int) -> Need:
        """Return the demand of so many GPUs on a server; the job must be allowed there."""
        return ask.take[self.kind[server]][count]

    def placement(self, ask: JobDemand, spots: Spots) -> Placement:
        """Return the placement for what is asked at these spots."""
        made = ask.made.get(spots)
        if made is None:
            some = [shares(self.servers[at].name, count, ask.take[self.kind[at]][count]) for at, count in spots]
            made = ask.made[spots] = some[0] if len(some) == 1 else tuple(chain.from_iterable(some))
        return made

    def _skip_full(self) -> None:
        while self.first < len(self.gpus) and not self.gpus[self.first]:
            self.first += 1


@lru_cache(maxsize=1 << 16)
def shares(name: str, gpus: int, need: Need) -> Placement:
    """Return the placement on one server; equal ones are the same object, cheap to build and to compare."""
    return (Share(name, gpus, *need),)


STARVING_S = 1000 * 3600.0
"""A job that has not run for longer goes first (Synergy's published simulator)."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all servers; memory in MB."""

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
