"""CPUs and cache memory that the agent gives this job on its node, and the loaders and caches that follow them."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from cadenza.sidecar import wire
from cadenza.sidecar.client.session import identity

COUNT = wire.PAGE_TUNE_COUNT
POOL_SIZES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user sets the threads of torch's operations on the CPU."""
TOPOLOGY = Path("/sys/devices/system/cpu")


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
        self.threads: TorchThreads | None = None
        self.default_threads = 0


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

    A loader calls it when it hands out a batch, and the session now and then, outside the step path.
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
    return _bound_cpus(environ)


def _bound_cpus(environ: Mapping[str, str]) -> float:
    """Return this rank's share of the CPUs that it may run on."""
    bound = len(os.sched_getaffinity(0))
    return min(bound, max(bound, identity.number(environ, "SLURM_CPUS_ON_NODE") or 0) / local_ranks(environ))


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the ranks on this node from torchrun or the job step, 1 without either."""
    who = identity.read(environ)
    ranks = who.local_world_size if who is not None else None
    return ranks or identity.number(environ, "LOCAL_WORLD_SIZE") or 1


class TorchThreads:
    """The threads of torch's operations follow the CPUs of this rank, unless the user or the script set their number.

    More threads than CPUs spin for each other, which makes a step several times as long. ``default`` is torch's own
    number, from before the script could set another one; 0: not known, then one that torch would choose counts.
    """

    def __init__(self, default: int = 0, environ: Mapping[str, str] = os.environ) -> None:
        self._torch: Any = sys.modules["torch"]
        self._set = 0
        number = self._torch.get_num_threads()
        self._cpus = _bound_cpus(environ) if number <= len(os.sched_getaffinity(0)) else 0.0
        # OpenMP and MKL size their pools by these variables: then the number is the user's choice.
        if not any(environ.get(name) for name in POOL_SIZES) and number in ({default} if default else _likely(environ)):
            self._set = number

    def tuned(self, tuning: Tuning, ranks: int) -> None:
        """Set the threads to this rank's CPUs, once these differ from the ones that it began with."""
        cpus = tuning.cpus / ranks
        if cpus == self._cpus or self._torch.get_num_threads() != self._set:
            return
        self._cpus = cpus
        self._set = max(1, int(cpus))
        self._torch.set_num_threads(self._set)


def follow_threads() -> None:
    """Let torch's threads follow the job's CPUs; call it before the agent's first values are read, once or more."""
    if _here.threads is None:
        _here.threads = TorchThreads(_here.default_threads)
    register(_here.threads)


def note_default_threads(number: int) -> None:
    """Note the threads that torch chose by itself."""
    _here.default_threads = number


def _likely(environ: Mapping[str, str]) -> set[int]:
    """Return the numbers of threads that torch may have chosen: CPUs or cores that the process or the job has."""
    bound = os.sched_getaffinity(0)
    cores = {(_text(cpu, "physical_package_id"), _text(cpu, "core_id")) for cpu in bound}
    granted = {identity.number(environ, name) or 0 for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK")}
    return {len(bound), len(cores), *granted} - {0}


def _text(cpu: int, name: str) -> str:
    """Return a word on a CPU's place; the CPU's own number where the system does not say."""
    try:
        return (TOPOLOGY / f"cpu{cpu}" / "topology" / name).read_text()
    except OSError:
        return str(cpu)
