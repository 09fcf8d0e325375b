"""The demand of a job: its best case as Synergy's simulator counts it, and its proportional share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple, TypeAlias

from cadenza.policies.allocation.problem import Server, proportional_share, share_speed
from cadenza.policies.core.model import Job, Placement, Share
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE, Demand, Profile


class Need(NamedTuple):
    """CPUs and memory (MB)."""

    cpus: int
    memory_mb: int


Table: TypeAlias = tuple[Need, ...]
"""CPUs and memory of a job on one server with 0, 1, 2 … of its GPUs there."""
Spots: TypeAlias = tuple[tuple[int, int], ...]
"""The GPUs of a job: (server, GPUs), servers ascending and named by their position in the case."""


TableOf: TypeAlias = Callable[[Profile | None, Server, int], tuple[Table, bool]]
"""The demand of a job with a profile on a server, by its GPUs there, and True if it exceeds its share anywhere."""
NOTHING: tuple[Table, bool] = ((), False)


class JobDemand:
    """The demand of one kind of job on each kind of server, and the position of its first fit."""

    __slots__ = ("exceeds", "gpu_type", "gpus", "made", "seen", "start", "take")

    def __init__(self, gpus: int, gpu_type: str, take: tuple[Table, ...], *, exceeds: bool) -> None:
        self.gpus = gpus
        self.gpu_type = gpu_type
        self.take = take
        """By kind of server; empty where the job may not run."""
        self.exceeds = exceeds
        """True if it exceeds the proportional share anywhere."""
        self.start = 0
        """No server before this one could take one GPU's worth of it …"""
        self.seen = 0
        """… after so many changes of the books."""
        self.made: dict[Spots, Placement] = {}
        """The placements that were built for it, to be shared."""


def proportional_need(server: Server, gpus: int) -> Need:
    """Return g/G of a server's CPUs and memory, also for more GPUs than it has."""
    share = proportional_share(server, gpus)
    return Need(share.cpus, share.memory_mb)


def best_need(profile: Profile | None, server: Server, gpus: int) -> Need:
    """Return a job's best-case demand, clipped to one server (Synergy's simulator, ``add_synergy_profile``).

    A job with more GPUs than a server gets its proportional share of whatever one server lacks. A job without a
    profile asks for its proportional share.
    """
    fair = proportional_need(server, gpus)
    if profile is None:
        return fair
    best = profile.on(server.gpu_type).best if server.gpu_type else profile.best
    spans = gpus > server.gpus
    cpus = ceil(best.cpus * gpus - TOLERANCE)
    memory_mb = ceil(best.memory_gb * gpus * MB_PER_GB - TOLERANCE)
    return Need(
        cpus if cpus <= server.cpus else fair.cpus if spans else server.cpus,
        memory_mb if memory_mb <= server.memory_mb else fair.memory_mb if spans else server.memory_mb,
    )


def static_need(profile: Profile | None, kinds: Sequence[Server], gpus: int) -> Need:
    """Return the most of each resource that a job's best-case demand is on any kind of server."""
    needs = [best_need(profile, kind, gpus) for kind in kinds]
    return Need(max((need.cpus for need in needs), default=0), max((need.memory_mb for need in needs), default=0))


class JobDemands:
    """The asks of one round; jobs with the same profile, GPUs and GPU type share one."""

    __slots__ = ("_best", "_fair", "_kinds", "_table_of")

    def __init__(self, kinds: Sequence[Server], table_of: TableOf) -> None:
        self._kinds = kinds
        """One server of each kind."""
        self._table_of = table_of
        self._best: dict[tuple[Profile | None, int, str], JobDemand] = {}
        self._fair: dict[tuple[int, str], JobDemand] = {}

    def best(self, job: Job, gpu_type: str = "") -> JobDemand:
        """Return the ask for a job's best-case demand on servers of a GPU type, on any where none is named."""
        key = (job.profile, job.gpus, gpu_type)
        ask = self._best.get(key)
        if ask is None:
            offers = [
                self._table_of(job.profile, kind, job.gpus) if allows(kind, gpu_type) else NOTHING
                for kind in self._kinds
            ]
            take, exceeds = tuple(table for table, _ in offers), any(above for _, above in offers)
            ask = self._best[key] = JobDemand(job.gpus, gpu_type, take, exceeds=exceeds)
        return ask

    def fair(self, gpus: int, gpu_type: str = "") -> JobDemand:
        """Return the ask for a proportional share."""
        ask = self._fair.get((gpus, gpu_type))
        if ask is None:
            take = tuple(fair_table(kind, gpus) if allows(kind, gpu_type) else () for kind in self._kinds)
            ask = self._fair[gpus, gpu_type] = JobDemand(gpus, gpu_type, take, exceeds=False)
        return ask


def allows(server: Server, gpu_type: str) -> bool:
    """Return whether a job for a GPU type may run on a server; the empty type is any."""
    return not gpu_type or server.gpu_type == gpu_type


def more(need: Need, other: Need) -> bool:
    """Return whether a need is in any resource above another."""
    return need.cpus > other.cpus or need.memory_mb > other.memory_mb


def fair_table(server: Server, gpus: int) -> Table:
    """Return the proportional shares of a server for as many GPUs as a job can have there."""
    return tuple(proportional_need(server, count) for count in range(min(gpus, server.gpus) + 1))


@lru_cache(maxsize=1 << 16)
def best_table(profile: Profile | None, server: Server, gpus: int) -> tuple[Table, bool]:
    """Return a best-case demand on one server for as many of a job's GPUs as fit, and if it is above its share.

    Part of the GPUs get their part of the CPUs and memory, rounded down.
    """
    need = best_need(profile, server, gpus)
    most = min(gpus, server.gpus)
    table = tuple(Need(need.cpus * count // gpus, need.memory_mb * count // gpus) for count in range(most + 1))
    return table, more(need, proportional_need(server, gpus))


@lru_cache(maxsize=1 << 16)
def sound_table(profile: Profile | None, server: Server, gpus: int, margin: float) -> tuple[Table, bool]:
    """Return a best-case demand on one server like ``best_table``, but never slower than the proportional share there.

    A job with more GPUs than a server is clipped to the fewest servers that hold it.
    """
    if profile is None:
        return fair_table(server, gpus), False
    best = profile.on(server.gpu_type).best if server.gpu_type else profile.best
    return promised_table(profile, server, gpus, best, margin)


def promised_table(profile: Profile, server: Server, gpus: int, wanted: Demand, margin: float) -> tuple[Table, bool]:
    """Return a server's table for a demand per GPU, by the job's GPUs there, and True if it exceeds the share.

    Parts are rounded up, so that none falls below its grid point. A part that promises less than ``1 + margin`` times
    the throughput of its proportional share is that share.
    """
    nodes = -(-gpus // server.gpus)
    cpus = min(ceil(wanted.cpus * gpus - TOLERANCE), nodes * server.cpus)
    memory_mb = min(ceil(wanted.memory_gb * gpus * MB_PER_GB - TOLERANCE), nodes * server.memory_mb)
    whole = proportional_need(server, gpus)
    table = list(fair_table(server, gpus))
    exceeds = False
    for count, share in enumerate(table[1:], 1):
        need = Need(
            _part(cpus, whole.cpus, count, gpus, share.cpus),
            _part(memory_mb, whole.memory_mb, count, gpus, share.memory_mb),
        )
        if promises(profile, server, count, need, margin):
            table[count] = need
            exceeds = exceeds or more(need, share)
    return tuple(table), exceeds


def _part(need: int, whole: int, count: int, gpus: int, share: int) -> int:
    """Return the part of a job's need for some GPUs, rounded up, but within the share where the whole job is in its."""
    part = -(-need * count // gpus)
    return min(part, share) if need <= whole else part


def promises(profile: Profile | None, server: Server, count: int, need: Need, margin: float) -> bool:
    """Return whether a need is the proportional share or by profile promises ``1 + margin`` times its throughput."""
    share = proportional_share(server, count)
    if need == share[2:] or profile is None:
        return need == share[2:]
    speed = share_speed(profile, Share(server.name, count, *need), server.gpu_type)
    return speed >= (1 + margin) * share_speed(profile, share, server.gpu_type) - TOLERANCE
