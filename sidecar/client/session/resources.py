"""What the agent gives this job on its node, and who in this process follows it: loaders and caches (stdlib only)."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from cadenza.sidecar import wire

COUNT = wire.PAGE_TUNE_COUNT


class Tuning(NamedTuple):
    """What the whole job has on this node now: CPUs, and MiB for its loaders' caches; None: nobody says."""

    cpus: float
    cache_mb: int | None


class Source(Protocol):
    """The session that hears of it; its page changes when its agent does."""

    words: memoryview

    @property
    def local_ranks(self) -> int:
        """How many ranks of the job share this node's part."""

    def waited(self, seconds: float) -> None:
        """Add time in which the training loop was blocked in its loader."""


class Follower(Protocol):
    """Something that follows what the job has."""

    def tuned(self, tuning: Tuning, ranks: int) -> None:
        """Follow what the job has now; ``ranks`` share it. Called between two steps, in the training's thread."""


class _Followers:
    """The followers of this process, held weakly, and the words that they have followed."""

    def __init__(self) -> None:
        self.source: weakref.ref[Source] | None = None
        self.known: weakref.WeakSet[Follower] = weakref.WeakSet()
        self.words: memoryview | None = None
        self.count = 0


_here = _Followers()


def listen(source: Source) -> None:
    """Follow what this session's agent writes from now on."""
    _here.source = weakref.ref(source)


def source() -> Source | None:
    """Return the session that is listened to."""
    return _here.source() if _here.source is not None else None


def read(words: memoryview) -> Tuning | None:
    """Return what the agent has written; None before it has."""
    if not words[COUNT]:
        return None
    cache_mb = words[wire.PAGE_CACHE_MB]
    return Tuning(words[wire.PAGE_CPUS_CENTI] / 100, None if cache_mb == wire.UNSAID else cache_mb)


def look() -> None:
    """Have all follow what the agent has written since the last look; one read of memory when it has not.

    This is done where a batch is handed out, between two steps, and not on the step path: a job without such a
    loader does not pay for it.
    """
    session = source()
    if session is None:
        return
    words, count = session.words, session.words[COUNT]
    if count == _here.count and words is _here.words:
        return
    _here.words, _here.count = words, count
    for follower in list(_here.known):
        bring(follower)


def register(follower: Follower) -> None:
    """Have something follow from now on, for as long as it lives."""
    _here.known.add(follower)
    bring(follower)


def bring(follower: Follower) -> None:
    """Bring one follower to what the job has now, if anybody has said it."""
    session = source()
    tuning = read(session.words) if session is not None else None
    if session is not None and tuning is not None:
        follower.tuned(tuning, session.local_ranks)


def own_cpus(environ: Mapping[str, str] = os.environ) -> float:
    """Return the CPUs of this rank: its share of what the agent wrote, else of those that it may run on.

    Without an agent a rank that is bound to fewer CPUs than the job has here (srun's ``--cpu-bind``) has these for
    itself; otherwise the local ranks share them.
    """
    session = source()
    tuning = read(session.words) if session is not None else None
    if session is not None and tuning is not None:
        return tuning.cpus / session.local_ranks
    bound = len(os.sched_getaffinity(0))
    return min(bound, max(bound, _count(environ, "SLURM_CPUS_ON_NODE")) / local_ranks(environ))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the ranks on this node as torchrun or the job step says; 1 when neither does."""
    from cadenza.sidecar.client.session import identity  # noqa: PLC0415

    who = identity.read(environ)
    known = who.local_world_size if who is not None else None
    return known or _count(environ, "LOCAL_WORLD_SIZE") or 1


def _count(environ: Mapping[str, str], name: str) -> int:
    """Return a variable as a number; 0 when it is none."""
    text = environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
