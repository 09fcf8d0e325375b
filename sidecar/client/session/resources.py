"""CPUs and cache memory that the agent gives this job on its node, and the loaders and caches that follow them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from cadenza.sidecar import wire
from cadenza.sidecar.client.session import identity

COUNT = wire.PAGE_TUNE_COUNT


class Tuning(NamedTuple):
    """Resources of the whole job on this node: CPUs, and MiB for its loaders' caches (None: not set)."""

    cpus: float
    cache_mb: int | None


class Source(Protocol):
    """The session whose page the agent writes; the page changes when the agent does."""

    words: memoryview

    @property
    def local_ranks(self) -> int:
        """Number of the job's ranks on this node."""

    def waited(self, seconds: float) -> None:
        """Add time in which the training loop was blocked in its loader."""


class Follower(Protocol):
    """A loader or cache that follows the job's resources."""

    def tuned(self, tuning: Tuning, ranks: int) -> None:
        """Follow new resources, shared by ``ranks``. Called between two steps, in the training's thread."""


class _Followers:
    """The followers of this process, held weakly, and the page and count that they have followed."""

    def __init__(self) -> None:
        self.source: weakref.ref[Source] | None = None
        self.members: weakref.WeakSet[Follower] = weakref.WeakSet()
        self.words: memoryview | None = None
        self.count = 0


_here = _Followers()


def set_source(source: Source) -> None:
    """Follow this session's page from now on."""
    _here.source = weakref.ref(source)


def source() -> Source | None:
    """Return the session whose page is followed."""
    return _here.source() if _here.source is not None else None


def read(words: memoryview) -> Tuning | None:
    """Return the agent's values; None before it has written any."""
    if not words[COUNT]:
        return None
    cache_mb = words[wire.PAGE_CACHE_MB]
    return Tuning(words[wire.PAGE_CPUS_CENTI] / 100, None if cache_mb == wire.UNSAID else cache_mb)


def update_all() -> None:
    """Update all followers if the agent has written new values; otherwise this is one read of memory.

    A loader calls it when it hands out a batch, between two steps, and not on the step path: a job without such a
    loader does not pay for it.
    """
    session = source()
    if session is None:
        return
    words, count = session.words, session.words[COUNT]
    if count == _here.count and words is _here.words:
        return
    _here.words, _here.count = words, count
    for follower in list(_here.members):
        update(follower)


def register(follower: Follower) -> None:
    """Update this follower from now on, for as long as it lives."""
    _here.members.add(follower)
    update(follower)


def update(follower: Follower) -> None:
    """Tell one follower the job's present resources, if the agent has written any."""
    session = source()
    tuning = read(session.words) if session is not None else None
    if session is not None and tuning is not None:
        follower.tuned(tuning, session.local_ranks)


def own_cpus(environ: Mapping[str, str] = os.environ) -> float:
    """Return the CPUs of this rank: its share of the agent's value, else of the CPUs that it may run on.

    Without an agent, a rank that is bound to fewer CPUs than the job has here (srun's ``--cpu-bind``) has these for
    itself; otherwise the local ranks share them.
    """
    session = source()
    tuning = read(session.words) if session is not None else None
    if session is not None and tuning is not None:
        return tuning.cpus / session.local_ranks
    bound = len(os.sched_getaffinity(0))
    return min(bound, max(bound, identity.number(environ, "SLURM_CPUS_ON_NODE") or 0) / local_ranks(environ))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the ranks on this node from torchrun or the job step, 1 without either."""
    who = identity.read(environ)
    ranks = who.local_world_size if who is not None else None
    return ranks or identity.number(environ, "LOCAL_WORLD_SIZE") or 1
