"""Pareto-optimal options of a job on one kind of node: (CPUs, memory, speed) points."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cadenza.policies.allocation.problem import Server, proportional_share
from cadenza.policies.core.model import Job
from cadenza.policies.core.profile import MB_PER_GB, TOLERANCE, Profile

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]

MOST_CPU_UNITS = 128
"""A node with more CPUs is divided in steps of several, where these divide a GPU's share."""
MEMORY_UNITS_PER_GPU = (3, 6, 12)
"""Memory units for each GPU, tried in this order: the first that wastes little on the given profiles."""
WASTE = 1 / 64
"""Most of a GPU's memory share that rounding a grid point up may waste."""
GOOD_SPEED = 0.95
"""The part of its best speed at which a job's appetite is read off: noise can put the best at the grid's edge."""
CPU_UNITS, MEMORY_UNITS, SPEED, CPUS, MEMORY_MB = range(5)
"""Rows of a table of options."""


Shape: TypeAlias = tuple[int, int, int, str]
"""A server without its name."""


class Kind(NamedTuple):
    """Servers that are alike, and how finely they are divided. Memory in MB."""

    gpus: int
    cpus: int
    memory_mb: int
    gpu_type: str
    cpu_step: int
    """CPUs in a unit."""
    memory_units: int
    """Units that the whole memory has, a multiple of ``gpus``, so that every proportional share is exact."""

    @property
    def cpu_units(self) -> int:
        """Return the units that all CPUs make."""
        return self.cpus // self.cpu_step

    def units(self, memory_mb: int) -> int:
        """Return the memory units that hold so many MB."""
        return -(-memory_mb * self.memory_units // self.memory_mb)


class Options(NamedTuple):
    """The options of a job on one kind of node."""

    table: Floats
    """A column for each option, in ascending order of CPUs, then memory; rows as ``CPU_UNITS`` … ``MEMORY_MB``."""
    best: float
    """The highest speed."""
    appetite: float
    """The least part of a node, CPUs and memory added, with which it runs at nearly its best speed."""


class _Axis(NamedTuple):
    """The amounts of one resource that a job can hold, ascending."""

    amounts: Sequence[int]
    units: Sequence[int]
    place: NDArray[np.intp]
    """The profile's grid index at each amount."""
    factor: Floats
    """Factor of the speed at each amount: below 1 only below the grid."""
    fair: int
    """Index of the proportional share."""


def kinds(servers: Iterable[Server], profiles: Iterable[Profile]) -> dict[Shape, Kind]:
    """Return the kind of each distinct server."""
    grids = {profile.memory_gb_per_gpu for profile in profiles}
    found = {}
    for shape in sorted({server[1:] for server in servers}):
        gpus, cpus, memory_mb, _ = shape
        units = max((_memory_units(grid, memory_mb / gpus) for grid in grids), default=MEMORY_UNITS_PER_GPU[0])
        found[shape] = Kind(*shape, _cpu_step(gpus, cpus), units * gpus)
    return found


def _cpu_step(gpus: int, cpus: int) -> int:
    each, rest = divmod(cpus, gpus)
    if rest:
        return 1
    steps = (step for step in range(1, each + 1) if each % step == 0 and cpus // step <= MOST_CPU_UNITS)
    return next(steps, max(each, 1))


@lru_cache(maxsize=1 << 12)
def _memory_units(grid: tuple[float, ...], share_mb: float) -> int:
    """Return the units into which a GPU's share of the memory is divided so that a grid is met well enough."""
    for units in MEMORY_UNITS_PER_GPU:
        needs = (gb * MB_PER_GB * units / share_mb for gb in grid)
        if all(ceil(need - TOLERANCE) - need <= WASTE * units for need in needs):
            return units
    return MEMORY_UNITS_PER_GPU[-1]


def unmeasured(kind: Kind, gpus: int) -> Options:
    """Return the only option of a job without a profile: its proportional share, at speed 1."""
    share = proportional_share(_server(kind), gpus)
    column = (-(-share.cpus // kind.cpu_step), kind.units(share.memory_mb), 1.0, share.cpus, share.memory_mb)
    appetite = column[0] / max(kind.cpu_units, 1) + column[1] / kind.memory_units
    return Options(np.array(column, dtype=np.float64).reshape(5, 1), 1.0, appetite)


def derive(profiles: Iterable[Profile], kind: Kind, gpus: int, margin: float) -> Hashable:
    """Work out the options of profiles on one kind of node, and return the key under which ``derived`` has them.

    An option promises at least ``1 + margin`` times the speed of the proportional share, or is that share. No option
    takes as much as another and is as fast.
    """
    key = (kind, gpus, margin)
    groups: dict[tuple[tuple[float, ...], ...], list[Profile]] = {}
    for profile in profiles:
        if key not in profile.derived:
            there = profile.on(kind.gpu_type) if kind.gpu_type else profile
            groups.setdefault((there.cpus_per_gpu, there.memory_gb_per_gpu), []).append(profile)
    for (cpus, memory), group in groups.items():
        share = proportional_share(_server(kind), gpus)
        cpu_axis = _axis(cpus, gpus, 1, share.cpus, kind.cpus, lambda amount: -(-amount // kind.cpu_step))
        memory_axis = _axis(memory, gpus, MB_PER_GB, share.memory_mb, kind.memory_mb, kind.units)
        found = _prune(_speeds(group, kind, cpu_axis, memory_axis), kind, cpu_axis, memory_axis, margin)
        for profile, options in zip(group, found, strict=True):
            profile.derived[key] = options
    return key


def _axis(grid: tuple[float, ...], gpus: int, scale: int, fair: int, most: int, units: Callable[[int], int]) -> _Axis:
    """Return the amounts from a grid of one GPU's, of which ``scale`` amounts make 1, and the proportional share."""
    amounts = sorted({fair} | {need for one in grid if (need := ceil(one * gpus * scale - TOLERANCE)) <= most})
    each = [amount / gpus / scale for amount in amounts]
    place = [bisect_right(grid, value + TOLERANCE) - 1 for value in each]
    factor = [value / grid[0] if at < 0 else 1.0 for at, value in zip(place, each, strict=True)]
    number = amounts.index(fair)
    return _Axis(amounts, list(map(units, amounts)), np.maximum(np.array(place), 0), np.array(factor), number)


def _speeds(group: Sequence[Profile], kind: Kind, cpus: _Axis, memory: _Axis) -> Floats:
    """Return speeds over (CPUs, memory, profile), as ``case.share_speed``."""
    there = [profile.on(kind.gpu_type) for profile in group] if kind.gpu_type else group
    rows, columns = len(there[0].cpus_per_gpu), len(there[0].memory_gb_per_gpu)
    values = chain.from_iterable(chain.from_iterable([profile.throughput for profile in there]))
    flat = np.fromiter(values, dtype=np.float64, count=len(group) * rows * columns)
    grids = flat.reshape(len(group), rows * columns).T.reshape(rows, columns, len(group))
    speeds = grids[cpus.place[:, None], memory.place[None, :]]
    speeds *= (cpus.factor[:, None] * memory.factor[None, :])[:, :, None]
    speeds *= np.array([1.0 if a is b else a.iteration_s / b.iteration_s for a, b in zip(group, there, strict=True)])
    return speeds


def _prune(speeds: Floats, kind: Kind, cpus: _Axis, memory: _Axis, margin: float) -> list[Options]:
    offered = speeds >= (1 + margin) * speeds[cpus.fair, memory.fair]
    offered[cpus.fair, memory.fair] = True
    gains = np.where(offered, speeds, -1.0)
    reached = np.maximum.accumulate(np.maximum.accumulate(gains, axis=0), axis=1)
    worth = offered
    worth[1:] &= gains[1:] > reached[:-1]
    worth[:, 1:] &= gains[:, 1:] > reached[:, :-1]
    number, cell = np.nonzero(worth.reshape(-1, worth.shape[2]).T)
    row, column = np.divmod(cell, worth.shape[1])
    table = np.empty((5, len(number)))
    table[CPU_UNITS] = np.array(cpus.units)[row]
    table[MEMORY_UNITS] = np.array(memory.units)[column]
    table[SPEED] = speeds[row, column, number]
    table[CPUS] = np.array(cpus.amounts)[row]
    table[MEMORY_MB] = np.array(memory.amounts)[column]
    best = reached[-1, -1]
    part = table[CPU_UNITS] / max(kind.cpu_units, 1) + table[MEMORY_UNITS] / kind.memory_units
    part[table[SPEED] < GOOD_SPEED * best[number]] = np.inf
    appetites = np.minimum.reduceat(part, np.searchsorted(number, np.arange(len(best)))).tolist()
    ends = np.cumsum(np.bincount(number, minlength=len(best))).tolist()
    return [
        Options(table[:, begin:end], top, appetite)
        for begin, end, top, appetite in zip([0, *ends[:-1]], ends, best.tolist(), appetites, strict=True)
    ]


def _server(kind: Kind) -> Server:
    return Server("", kind.gpus, kind.cpus, kind.memory_mb, kind.gpu_type)


Row: TypeAlias = list[Options | None]
"""By kind; None where the job has too many GPUs for one such node."""


def offers(jobs: Sequence[Job], kinds: Sequence[Kind], margin: float) -> list[Row]:
    """Return the options of each job, all its GPUs on one node; jobs that are alike share a row."""
    every = tuple(kinds)
    keys = {gpus: repr((every, gpus, margin)) for gpus in {job.gpus for job in jobs}}  # a string keeps its hash
    rows = {gpus: [unmeasured(kind, gpus) if gpus <= kind.gpus else None for kind in kinds] for gpus in keys}
    missing: dict[int, dict[Profile, None]] = {}
    for job in jobs:
        if job.profile is not None and keys[job.gpus] not in job.profile.derived:
            missing.setdefault(job.gpus, {})[job.profile] = None
    for gpus, profiles in missing.items():
        names = [derive(profiles, kind, gpus, margin) if gpus <= kind.gpus else None for kind in kinds]
        for profile in profiles:
            derived = profile.derived
            derived[keys[gpus]] = [None if name is None else derived[name] for name in names]
    return [rows[job.gpus] if job.profile is None else job.profile.derived[keys[job.gpus]] for job in jobs]


def part(profile: Profile | None, kind: Kind, gpus: int, margin: float) -> Options:
    """Return the options of so many of a job's GPUs on one kind of node."""
    if profile is None:
        return unmeasured(kind, gpus)
    derive((profile,), kind, gpus, margin)
    found: Options = profile.derived[kind, gpus, margin]
    return found
