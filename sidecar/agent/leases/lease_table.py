"""The leases of a host: a state machine without I/O or clock that decides which job may use which GPUs.

A job leaves the table when it ends. A held or stopping lease occupies its GPUs. Two such leases never share a GPU
unless their jobs are packed. When a pack ends while several of its jobs hold their GPUs, these jobs are *loose* until
all but one have yielded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Literal, TypeAlias

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.errors import LeaseConflictError

State: TypeAlias = Literal["waiting", "held", "stopping", "yielded"]
OCCUPYING = frozenset({"held", "stopping"})
TRANSITIONS: tuple[tuple[State, str, State], ...] = (
    ("waiting", "grant", "held"),
    ("yielded", "grant", "held"),
    ("held", "stop", "stopping"),
    ("stopping", "keep", "held"),
    ("stopping", "release", "yielded"),
    ("waiting", "set aside", "yielded"),
    ("yielded", "set aside", "yielded"),
)
"""State, event, next state. A job is registered as *waiting*."""
_NEXT: Mapping[tuple[State, str], State] = {(state, event): after for state, event, after in TRANSITIONS}


class Process(msgspec.Struct, frozen=True):
    """A process of a job; the start time tells it from a later one with the same pid."""

    pid: int
    start_ticks: int
    batch: bool = False
    """The batch script: the job has left this host when it ends."""


class GpuProcess(msgspec.Struct, frozen=True):
    """A process that the driver stops: its memory on each GPU, as Slurm's index and bytes."""

    pid: int
    start_ticks: int
    gpu_bytes: tuple[tuple[int, int], ...] = ()
    spare_bytes: tuple[tuple[int, int], ...] = ()
    """Memory of each GPU that was free while it ran."""


class Lease(msgspec.Struct):
    """One job's lease on this host. Epoch times in seconds."""

    job: int
    restart: int
    uid: int
    gpus: tuple[int, ...]
    since_s: float
    """Time of the last change of state."""
    user: str = ""
    node: str = ""
    lane: int = 0
    hosts: int = 1
    managed: bool = True
    options: str = ""
    weight: float = 1.0
    priority: int = 0
    state: State = "waiting"
    vtime_s: float = 0.0
    """Held time over weight, without the stretch under way."""
    held_since_s: float = 0.0
    """Time of the last grant; meaningful while the lease is held or stopping."""
    processes: tuple[Process, ...] = ()
    group: str = ""
    """The job's group in Slurm's tree, as ``Groups.slurm_job`` names it; "" where Slurm has none."""
    stepds: tuple[Process, ...] = ()
    """The slurmstepd of each step that root has registered: where there are no groups, its descendants are the job."""
    cpus: float = 0.0
    """CPUs of Slurm's allocation on this host, from the registration; 0 if unknown."""
    memory_mb: int = 0
    frozen: tuple[GpuProcess, ...] = ()
    """Processes that the driver path works on: locked, checkpointed, or about to be."""
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each of its GPUs that it needs to go on, without what it kept at its last yield; empty if unknown."""
    left_bytes: tuple[int, ...] = ()
    """Memory of each of its GPUs that its processes kept at its last yield."""
    pack: int = 0
    """Jobs with the same number above 0 may have the same GPUs at once, by the service's order."""
    loose: bool = False
    """Its pack is over and another job of it still has the same GPUs: all but one must yield."""

    late: bool = False
    """The job has started without its lease, as its user wanted, and has not asked for it yet."""
    early: str = ""
    """The process that was seen on a GPU before the job had asked; from then on the job waits where it starts."""

    @property
    def key(self) -> JobKey:
        """The incarnation that this lease belongs to."""
        return JobKey(self.job, self.restart)

    @property
    def unasked(self) -> bool:
        """True while the job takes no turns, because it has not asked for its lease yet."""
        return self.late and self.managed

    @property
    def occupying(self) -> bool:
        """True while the GPUs are this job's."""
        return self.state in OCCUPYING

    @property
    def needs(self) -> dict[int, int]:
        """Memory that it needs to go on, by GPU; empty if unknown."""
        return dict(zip(self.gpus, self.gpu_bytes, strict=False))

    def held_s(self, now: float) -> float:
        """Return the length of the stretch under way; 0 if there is none."""
        return max(0.0, now - self.held_since_s) if self.occupying else 0.0

    def vtime(self, now: float) -> float:
        """Return held time over weight up to now, the key of the weighted round robin."""
        return self.vtime_s + self.held_s(now) / self.weight

    def overlaps(self, other: Lease) -> bool:
        """Return True if the two want a GPU in common."""
        return not set(self.gpus).isdisjoint(other.gpus)

    def packed_with(self, other: Lease) -> bool:
        """Return True if the two may have the same GPUs at once; an unmanaged job never shares."""
        return self.pack != 0 and self.pack == other.pack and self.managed and other.managed

    def running_processes(self, start_ticks: Callable[[int], int | None]) -> tuple[Process, ...]:
        """Return the recorded processes that are still the same ones."""
        return tuple(process for process in self.processes if start_ticks(process.pid) == process.start_ticks)


class Stretch(msgspec.Struct, frozen=True):
    """A finished stretch of holding GPUs; epoch times in seconds."""

    key: JobKey
    gpus: tuple[int, ...]
    from_s: float
    to_s: float


class LeaseTable:
    """All leases of a host. ``changed`` counts the changes and tells the owner when to write the table to disk."""

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        self._leases = {lease.key: lease for lease in leases}
        self._on_gpu: dict[int, dict[JobKey, Lease]] = {}
        for lease in self._leases.values():
            self._index(lease)
        self.changed = 0
        self._check()

    def __iter__(self) -> Iterator[Lease]:
        return iter(tuple(self._leases.values()))

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: JobKey) -> Lease | None:
        """Return the lease of an incarnation, or None."""
        return self._leases.get(key)

    def register(self, lease: Lease, now: float) -> Lease:
        """Enter a job as *waiting*; it starts at the least vtime of the managed jobs that it overlaps."""
        lease.state = "waiting"
        self._begin_wait(lease, now)
        self._leases[lease.key] = lease
        self._index(lease)
        self.touch()
        return lease

    def ask(self, lease: Lease, now: float) -> None:
        """Let a job that started without its lease wait for it from now on, as if it had come only now."""
        lease.late = False
        self._begin_wait(lease, now)
        self.touch()

    def _begin_wait(self, lease: Lease, now: float) -> None:
        """Set the time and the virtual time at which a job begins to wait."""
        rivals = [other.vtime(now) for other in self.rivals(lease) if other.managed and not other.unasked]
        lease.vtime_s = min(rivals, default=0.0)
        lease.since_s = now

    def touch(self) -> None:
        """Record that other fields of a lease changed and must be written to disk."""
        self.changed += 1

    def shift(self, seconds: float) -> None:
        """Shift all times after the wall clock was set by ``seconds``."""
        for lease in self:
            lease.since_s += seconds
            lease.held_since_s += seconds
        self.touch()

    def blockers(self, lease: Lease) -> list[Lease]:
        """Return the other jobs that occupy a GPU of this one and may not share it."""
        return [other for other in self.rivals(lease) if other.occupying and not other.packed_with(lease)]

    def rivals(self, lease: Lease) -> list[Lease]:
        """Return the other jobs that want a GPU of this one."""
        if len(lease.gpus) == 1:
            found = self._on_gpu.get(lease.gpus[0], {})
        else:
            found = {key: other for gpu in lease.gpus for key, other in self._on_gpu.get(gpu, {}).items()}
        return [other for key, other in found.items() if key != lease.key]

    def pack(self, packs: Mapping[JobKey, int]) -> None:
        """Set the packs; jobs that are not named leave theirs.

        Holders that shared GPUs and may no longer do so become loose.
        """
        sharing = self._sharing()
        for lease in self:
            lease.pack = packs.get(lease.key, 0)
        for one, other in sharing:
            if not one.packed_with(other):
                one.loose = other.loose = True
        self._changed()

    def grant(self, lease: Lease, now: float) -> None:
        """Give a waiting or yielded job its lease; raise LeaseConflictError if a GPU is occupied."""
        self._require(lease, "grant")
        if taken := self.blockers(lease):
            holders = ", ".join(str(other.key) for other in taken)
            raise LeaseConflictError(f"job {lease.key}: GPUs {lease.gpus} are still held by {holders}")
        self._move(lease, "grant", now)
        lease.held_since_s, lease.late = now, False

    def stop(self, lease: Lease, now: float) -> None:
        """Record that a holder was asked to yield."""
        self._move(lease, "stop", now)

    def keep(self, lease: Lease, now: float) -> None:
        """Record that a stop was withdrawn; the stretch under way goes on."""
        self._move(lease, "keep", now)

    def set_aside(self, lease: Lease, now: float) -> None:
        """Record that a job has moved its state out without ever holding a lease of this table."""
        self._move(lease, "set aside", now)

    def release(self, lease: Lease, now: float) -> Stretch:
        """Take the lease of a job that has moved its state out, and return the stretch that ends."""
        self._require(lease, "release")
        stretch = self._end(lease, now)
        self._move(lease, "release", now)
        return stretch

    def drop(self, lease: Lease, now: float) -> Stretch | None:
        """Forget a job that has left the host; return the stretch that ends, if one does."""
        stretch = self._end(lease, now) if lease.occupying else None
        self._leases.pop(lease.key, None)
        for gpu in lease.gpus:
            self._on_gpu.get(gpu, {}).pop(lease.key, None)
        self._changed()
        return stretch

    def _index(self, lease: Lease) -> None:
        """Enter a job where others look for those that want the same GPUs."""
        for gpu in lease.gpus:
            self._on_gpu.setdefault(gpu, {})[lease.key] = lease

    def _end(self, lease: Lease, now: float) -> Stretch:
        """Charge the stretch under way to the job."""
        lease.vtime_s = lease.vtime(now)
        return Stretch(lease.key, lease.gpus, lease.held_since_s, max(now, lease.held_since_s))

    def _require(self, lease: Lease, event: str) -> State:
        """Return the next state; raise LeaseConflictError if the table of transitions has none."""
        after = _NEXT.get((lease.state, event))
        if after is None:
            raise LeaseConflictError(f"job {lease.key}: {event!r} does not follow {lease.state!r}")
        return after

    def _move(self, lease: Lease, event: str, now: float) -> None:
        """Change a state along a transition."""
        lease.state = self._require(lease, event)
        lease.since_s = now
        self._changed()

    def _changed(self) -> None:
        """End looseness where a job has its GPUs alone or with its pack, and check the invariant."""
        self.touch()
        apart = {one.key for pair in self._sharing() if not pair[0].packed_with(pair[1]) for one in pair}
        for lease in self._leases.values():
            lease.loose = lease.loose and lease.key in apart
        self._check()

    def _sharing(self) -> list[tuple[Lease, Lease]]:
        """Return the pairs that occupy a GPU together."""
        pairs: dict[tuple[JobKey, JobKey], tuple[Lease, Lease]] = {}
        for wanted in self._on_gpu.values():
            holders = [lease for lease in wanted.values() if lease.occupying]
            pairs |= {(one.key, other.key): (one, other) for one, other in combinations(holders, 2)}
        return list(pairs.values())

    def _check(self) -> None:
        """Raise LeaseConflictError if two leases meet on a GPU: the one place that states the invariant."""
        for one, other in self._sharing():
            if not (one.packed_with(other) or (one.loose and other.loose)):
                gpu = min(set(one.gpus) & set(other.gpus))
                raise LeaseConflictError(f"GPU {gpu} is leased to {one.key} and to {other.key}")
