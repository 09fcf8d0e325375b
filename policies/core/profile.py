"""A job's measured sensitivity to CPUs and memory: how fast it runs with what it is given (Synergy, OSDI'22, §3)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from types import MappingProxyType
from typing import Any, NamedTuple

MB_PER_GB = 1024
"""Slurm's: ``--mem=1G`` are 1024 MB."""
TOLERANCE = 1e-9


class Reference(NamedTuple):
    """The server whose proportional share has throughput 1; ``memory_gb`` in GB."""

    gpus: int = 8
    cpus: float = 24
    memory_gb: float = 500


REFERENCE = Reference()


class Match(NamedTuple):
    """Jobs that a profile is for besides those that name its model: shell patterns, all of which must fit."""

    name: str = ""
    """Pattern of the job's name in Slurm."""
    command: str = ""
    """Pattern of its command: the path of its batch script and the script's arguments."""


UNMATCHED = Match()


class Demand(NamedTuple):
    """Memory that a job takes for each of its GPUs."""

    cpus: float
    memory_gb: float


@dataclass(frozen=True, eq=False)
class Profile:
    """One model's throughput over (CPUs, memory), both for each GPU.

    ``throughput[i][j]`` is the speed with ``cpus_per_gpu[i]`` CPUs and ``memory_gb_per_gpu[j]`` GB a GPU, relative
    to the proportional share of ``reference``. Profiles are compared by identity: one is read once and shared.
    """

    model: str
    iteration_s: float
    """One iteration at the proportional share of ``reference``, seconds."""
    cpus_per_gpu: tuple[float, ...]
    """Grid, ascending."""
    memory_gb_per_gpu: tuple[float, ...]
    """Grid, ascending."""
    throughput: tuple[tuple[float, ...], ...]
    reference: Reference = REFERENCE
    gpu: str = ""
    """GPU type it was measured on; empty: any."""
    task: str = ""
    """The model's class, such as image, language or speech."""
    storage_mb_s: tuple[tuple[float, ...], ...] = ()
    """Storage bandwidth that each grid point needs, MB/s; empty: not measured."""
    gpu_memory_peak_gb: float | None = None
    gpu_memory_low_gb: float | None = None
    """GPU memory at a boundary, which is what a yield moves to the host, GB."""
    gpu_utilization: float | None = None
    """Share of time in which the GPU computes when the job has it alone, 0 to 1."""
    declared_best: Demand | None = None
    """Best-case demand as its publisher states it; None: the least grid point of full speed."""
    match: Match = UNMATCHED
    together: Mapping[str, float] = field(default_factory=dict, repr=False)
    """Throughput with another model on the same GPUs, over that of turns, as measured by `cadenza profile pair`; by
    the other's name."""
    siblings: Mapping[str, Profile] = field(default_factory=dict, repr=False)
    """The same model on other GPU types, by type; these have no siblings of their own, so that records end."""

    def speed(self, cpus_per_gpu: float, memory_gb_per_gpu: float) -> float:
        """Return the throughput of the largest grid point that is not above; below the grid it falls linearly."""
        row = bisect_right(self.cpus_per_gpu, cpus_per_gpu + TOLERANCE) - 1
        column = bisect_right(self.memory_gb_per_gpu, memory_gb_per_gpu + TOLERANCE) - 1
        speed = self.throughput[max(row, 0)][max(column, 0)]
        if row < 0:
            speed *= cpus_per_gpu / self.cpus_per_gpu[0]
        if column < 0:
            speed *= memory_gb_per_gpu / self.memory_gb_per_gpu[0]
        return speed

    @cached_property
    def best_speed(self) -> float:
        """Return the speed at the best-case demand."""
        return self.speed(*self.best)

    @cached_property
    def best(self) -> Demand:
        """Return the best-case demand: as declared, else the least CPUs, then memory, of the highest throughput."""
        if self.declared_best is not None:
            return self.declared_best
        top = max(max(row) for row in self.throughput)
        return next(
            Demand(cpus, memory)
            for cpus, row in zip(self.cpus_per_gpu, self.throughput, strict=True)
            for memory, value in zip(self.memory_gb_per_gpu, row, strict=True)
            if value >= top - TOLERANCE
        )

    def cache_mb(self, gpus: int, memory_mb: int) -> int | None:
        """Return the part of a job's memory for its loaders' caches, as the memory axis assumes (MinIO).

        The axis begins with what the job needs besides them. None where it has one point, or the memory is less.
        """
        rest_mb = memory_mb - ceil(self.memory_gb_per_gpu[0] * gpus * MB_PER_GB)
        return rest_mb if len(self.memory_gb_per_gpu) > 1 and rest_mb >= 0 else None

    @property
    def derived(self) -> dict[Hashable, Any]:
        """Return room for what an allocation works out from a profile once; it changes no result."""
        room: dict[Hashable, Any] | None = self.__dict__.get("_derived")
        if room is None:  # not a cached_property: its lock costs more than the rest where each job has a profile
            room = self.__dict__["_derived"] = {}
        return room

    def on(self, gpu: str) -> Profile:
        """Return the profile for a GPU type: the sibling measured there, else this one."""
        return self.siblings.get(gpu, self) if gpu != self.gpu else self

    def relative(self, gpu: str) -> float:
        """Return how many times faster a GPU type is at the proportional share, for this model."""
        return self.iteration_s / self.on(gpu).iteration_s


def linked(family: Mapping[str, Profile]) -> Mapping[str, Profile]:
    """Make one model's profiles, by GPU type, each other's siblings, and return them."""
    view = MappingProxyType(dict(family))
    for profile in view.values() if len(view) > 1 else ():
        object.__setattr__(profile, "siblings", view)  # they refer to each other, so none can come last
    return view


def least_cpus(profile: Profile, gpus: int, cpus: int, memory_mb: int, headroom: float = 1.0) -> int:
    """Return the fewest CPUs that are as fast as these, for a job of ``gpus`` GPUs; all totals.

    ``headroom``: as many times the CPUs that the profile says; never more than ``cpus``.
    """
    memory_gb = memory_mb / gpus / MB_PER_GB
    speed = profile.speed(cpus / gpus, memory_gb) - TOLERANCE
    enough = (each for each in profile.cpus_per_gpu if profile.speed(each, memory_gb) >= speed)
    needed = next(enough, None)
    return cpus if needed is None else max(min(ceil(needed * gpus * headroom - TOLERANCE), cpus), 1)
