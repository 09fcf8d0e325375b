"""The policies by name: a line for each, its source, and where its function is; nothing is imported until asked for."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Literal, TypeAlias, cast

from cadenza.policies.allocation.problem import Allocate
from cadenza.policies.core.errors import InputError
from cadenza.policies.ordering.ranking import Order

Kind: TypeAlias = Literal["ordering", "allocation", "sharing"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy as ``cadenza simulate --help`` shows it."""

    name: str
    kind: Kind
    line: str
    source: str
    profiled: bool = True
    """Allocations: whether jobs can get more than their proportional share."""
    steady: bool = False
    """Orderings: whether the order of two jobs never changes. Allocations: whether the plan is a function of the
    ordered runnable jobs alone. With both, a round whose runnable jobs are those of the last one can be left out."""
    backfills: bool = False
    """Allocations: whether jobs past the runnable ones may run on what is left."""
    leveled: bool = False
    """Orderings: whether the order of two jobs changes only when one of them leaves a level of *levels*, or never."""
    learns: bool = False
    """Orderings: whether jobs that have ended change it."""


KEEP_REQUESTS = "none"
"""Allocation without a function of its own: it counts GPUs like ``proportional``, and every job keeps its request."""
SYNERGY = "Synergy, OSDI'22"
CODE = "Synergy's published simulator"

ENTRIES: tuple[Entry, ...] = (
    Entry("fifo", "ordering", "first come, first served", SYNERGY + " §5", steady=True, leveled=True),
    Entry("srtf", "ordering", "shortest remaining time first", SYNERGY + " §5"),
    Entry("las", "ordering", "least attained GPU service first", SYNERGY + " §5; Tiresias, NSDI'19 §3"),
    Entry("ftf", "ordering", "worst finish-time fairness first", "Themis, NSDI'20 §3"),
    Entry("ftf-coded", "ordering", "finish-time fairness ascending, the least behind first", CODE),
    Entry("tiresias", "ordering", "two-dimensional LAS in discretized queues", "Tiresias, NSDI'19 §3"),
    Entry(
        "levels",
        "ordering",
        "least attained service in levels, first come first served within",
        "Tiresias, NSDI'19 §3",
        leveled=True,
    ),
    Entry(
        "gittins",
        "ordering",
        "likeliest to end soon first, by the attained service of the site's ended jobs",
        "Gittins 1979; Tiresias, NSDI'19 §3",
        learns=True,
    ),
    Entry("gavel", "ordering", "max-min throughput over GPU types, by time received", "Gavel, OSDI'20 §4"),
    Entry("fairshare", "ordering", "users and accounts by usage over shares", "Slurm, classic fair share"),
    Entry(
        "proportional",
        "allocation",
        "CPUs and memory in proportion to GPUs",
        SYNERGY + " §2",
        profiled=False,
        steady=True,
    ),
    Entry("greedy", "allocation", "first fit of best-case demand, else skipped", SYNERGY, backfills=True),
    Entry("tune", "allocation", "best fit of best-case demand, neighbors give back", SYNERGY, steady=True),
    Entry("tune-coded", "allocation", "TUNE as the published simulator does it", CODE, steady=True),
    Entry("opt", "allocation", "ILP over the profile matrix, then placement with few split jobs", SYNERGY, steady=True),
    Entry("drf", "allocation", "least dominant share first, then greedy", "DRF, NSDI'11; " + SYNERGY, backfills=True),
    Entry(
        "tetris",
        "allocation",
        "best aligned with what is free first",
        "Tetris, SIGCOMM'14",
        backfills=True,
    ),
    Entry("tetris-coded", "allocation", "least work first, then greedy", CODE, backfills=True),
    Entry("cadenza", "allocation", "whole profile matrix, placement chosen for it, sticky", "Cadenza"),
    Entry(
        KEEP_REQUESTS,
        "allocation",
        "jobs keep the CPUs and memory that they asked for (the default)",
        "Slurm",
        profiled=False,
    ),
    Entry("none", "sharing", "each GPU has one job until it ends or is preempted", "Slurm"),
    Entry(
        "preemption",
        "sharing",
        "running jobs of a worse level make way for the first jobs of Slurm's queue",
        "Cadenza; Tiresias, NSDI'19 §3",
    ),
    Entry("timeslice", "sharing", "jobs take turns on GPUs at mini-batch boundaries", "Gandiva, OSDI'18 §3"),
    Entry(
        "gandiva",
        "sharing",
        "time slices, packing with undo, migration, defragmentation, grow-shrink",
        "Gandiva, OSDI'18 §3-4",
    ),
)
"""In the order in which they are shown."""


def entry(kind: Kind, name: str) -> Entry:
    """Return a policy's entry; raise InputError with the nearest name for an unknown one."""
    names = {item.name: item for item in ENTRIES if item.kind == kind}
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
        raise InputError(f"no {kind} is called {name!r}; {hint}")
    return names[name]


def ordering(name: str) -> Order:
    """Return an ordering's function; raise InputError for an unknown name."""
    entry("ordering", name)
    return cast("Order", _function("ordering", name))


def allocation(name: str) -> Allocate:
    """Return an allocation's function; raise InputError for an unknown name."""
    entry("allocation", name)
    return cast("Allocate", _function("allocation", _implementation(name)))


def warm(name: str) -> None:
    """Let an allocation compile what it will need, so that its first decision is not the one that waits for that."""
    get_ready = getattr(_module("allocation", _implementation(name)), "warm", None)
    if get_ready is not None:
        get_ready()


def _implementation(allocation: str) -> str:
    return "proportional" if allocation == KEEP_REQUESTS else allocation


def _function(package: str, name: str) -> object:
    """Return the function of a policy: its module and it are called as the policy, with ``_`` for ``-``."""
    return getattr(_module(package, name), name.replace("-", "_"))


def _module(package: str, name: str) -> object:
    room = "as_published" if name.endswith("-coded") else package
    module = "cadenza.allocate" if name == "cadenza" else name.replace("-", "_")
    return import_module(f"cadenza.policies.{room}.{module}")
