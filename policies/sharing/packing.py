"""Packing with undo (Gandiva, OSDI'18, §4): jobs that leave a GPU idle run on it together, if that pays.

Only under overload. A job first runs alone, which gives its profile: the time of an iteration. Then the job with
the lowest GPU utilisation joins the one with the next lowest on its GPUs, if the memory of both fits; when their
throughput together, each relative to its own alone, is no more than that of turns (which is 1), it leaves again
and the pair is remembered; the next lowest is tried then. Nothing is predicted: a wrong profile costs one trial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cadenza.policies.actions import Pack, Unpack
from cadenza.policies.decision import SharingMemory
from cadenza.policies.model import Gpu, Job, JobKey, Lease
from cadenza.policies.sharing.packs import Group, after, partners, standing
from cadenza.policies.sharing.settings import GandivaSettings, SharingSettings
from cadenza.policies.sharing.wording import gpu_names, job_names

TURNS = 1.0
"""Throughput of jobs that take turns, each relative to its own alone."""


@dataclass(frozen=True, slots=True)
class Packing:
    """What packing wants of this round, and what it has learned."""

    actions: tuple[Pack | Unpack, ...]
    before: tuple[Group, ...]
    """The packs as they are now."""
    packs: tuple[Group, ...]
    """The packs once ``actions`` are done."""
    lost: tuple[tuple[JobKey, JobKey], ...]
    alone_s: tuple[tuple[JobKey, float], ...]

    def leaving(self, jobs: Mapping[JobKey, Job]) -> frozenset[JobKey]:
        """Return those who give up GPUs that they hold, because a job that they leave holds these too."""
        left = partners(self.before)
        gone = [action.job for action in self.actions if isinstance(action, Unpack)]
        return frozenset(key for key in gone if _holds(jobs[key]) and any(_holds(jobs[other]) for other in left[key]))


@dataclass(frozen=True, slots=True)
class Terms:
    """What packing depends on besides the jobs."""

    sharing: SharingSettings
    gandiva: GandivaSettings
    gpu_memory_gb: Mapping[str, float]
    """By host; a host without an entry has GPUs of unknown memory."""
    overloaded: bool
    """Whether jobs take turns anywhere (cluster height above 1)."""

    @property
    def on(self) -> bool:
        """Whether jobs may be packed at all."""
        return self.gandiva.introspective and self.gandiva.pack


def packing(jobs: Mapping[JobKey, Job], memory: SharingMemory, terms: Terms) -> Packing:
    """Return this round's packs and unpacks. ``jobs``: those that sharing manages and that agents know."""
    before = standing(memory.packs, jobs)
    alone = _alone(jobs, before, memory, terms.sharing.min_run_s)
    undone = tuple(_undone(jobs, before, alone, terms))
    losers = {_pair(action.job, other) for action in undone for other in partners(before)[action.job]}
    lost = tuple(sorted(losers.union(memory.lost))) if terms.on else memory.lost
    packs = after(before, undone)
    joined = tuple(_joined(_Stage(jobs, packs, alone, frozenset(lost), terms))) if terms.on and terms.overloaded else ()
    return Packing((*undone, *joined), before, after(packs, joined), lost, tuple(sorted(alone.items())))


def _pair(one: JobKey, other: JobKey) -> tuple[JobKey, JobKey]:
    return (min(one, other), max(one, other))


def _alone(
    jobs: Mapping[JobKey, Job], packs: Iterable[Group], memory: SharingMemory, min_run_s: float
) -> dict[JobKey, float]:
    """Return the time of an iteration of each job when it last had its GPUs alone."""
    found = {key: seconds for key, seconds in memory.alone_s if key in jobs}
    beside = partners(packs)
    for key, job in jobs.items():
        lease = job.lease
        if lease is None or lease.state != "held" or lease.held_s < min_run_s or not lease.iteration_s:
            continue
        if not any(_holds(jobs[other]) for other in beside.get(key, ())):
            found[key] = lease.iteration_s
    return found


def _holds(job: Job) -> bool:
    return job.lease is not None and job.lease.state in ("held", "stopping")


# --- Undo ----------------------------------------------------------------------------------------------


def _undone(
    jobs: Mapping[JobKey, Job], packs: Iterable[Group], alone: Mapping[JobKey, float], terms: Terms
) -> Iterator[Unpack]:
    for pack in packs:
        joiner = pack[0]
        others = job_names(pack[1:])
        if not terms.on:
            yield Unpack(joiner, f"runs in turns with {others} again: packing is off")
            continue
        speed = _speed([jobs[key] for key in pack], alone, terms.sharing.min_run_s)
        if speed is not None and speed <= TURNS:
            yield Unpack(
                joiner,
                f"runs in turns with {others} again: together they ran at {speed:.0%} of what they do in turns",
            )


def _speed(pack: Sequence[Job], alone: Mapping[JobKey, float], min_run_s: float) -> float | None:
    """Return the sum of the packed jobs' speeds, each relative to its own alone; None before all are measured."""
    speed = 0.0
    for job in pack:
        lease = job.lease
        if lease is None or lease.state != "held" or lease.held_s < min_run_s or not lease.iteration_s:
            return None
        if job.key not in alone:
            return None
        speed += alone[job.key] / lease.iteration_s
    return speed


# --- Packs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    """Jobs that take their turn as one on the same GPUs."""

    jobs: tuple[Job, ...]
    utilization: float
    peak_gb: float
    models: tuple[str, ...]

    @property
    def rank(self) -> tuple[float, JobKey]:
        """Return the sort key: the lowest utilisation first."""
        return self.utilization, min(job.key for job in self.jobs)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Everything that a choice depends on."""

    jobs: Mapping[JobKey, Job]
    packs: tuple[Group, ...]
    alone: Mapping[JobKey, float]
    lost: frozenset[tuple[JobKey, JobKey]]
    terms: Terms

    def places(self) -> list[list[_Unit]]:
        """Return the units on each set of GPUs that has several, the lowest utilisation first.

        A unit counts once all its jobs have been measured.
        """
        packed = {key for pack in self.packs for key in pack}
        there: dict[frozenset[Gpu], list[Group]] = {}
        for group in (*self.packs, *((key,) for key in sorted(self.jobs) if key not in packed)):
            there.setdefault(_gpus(self.jobs[group[0]]), []).append(group)
        several = [groups for groups in there.values() if len(groups) > 1]
        found = [[unit for group in groups if (unit := self._unit(group)) is not None] for groups in several]
        return sorted((sorted(units, key=_rank) for units in found if len(units) > 1), key=lambda units: units[0].rank)

    def _unit(self, group: Group) -> _Unit | None:
        known = [row for key in group if key in self.alone and (row := _measured(self.jobs[key])) is not None]
        if len(known) != len(group):
            return None
        members = tuple(self.jobs[key] for key in group)
        return _Unit(members, sum(row[0] for row in known), sum(row[1] for row in known), tuple(map(_model, members)))

    def suits(self, job: _Unit, other: _Unit, losing: frozenset[tuple[str, str]]) -> bool:
        """Whether one job may join a unit."""
        mine, model = job.jobs[0], job.models[0]
        if len(other.jobs) >= self.terms.gandiva.max_packed or any((model, name) in losing for name in other.models):
            return False
        size_gb = min((self.terms.gpu_memory_gb.get(gpu.host, 0.0) for gpu in _gpus(mine)), default=0.0)
        return job.peak_gb + other.peak_gb <= size_gb and all(self._together(mine, theirs) for theirs in other.jobs)

    def _together(self, mine: Job, theirs: Job) -> bool:
        sharing = self.terms.sharing
        return (
            (sharing.share_between_users or mine.user == theirs.user)
            and sharing.priority(mine) == sharing.priority(theirs)
            and _pair(mine.key, theirs.key) not in self.lost
        )

    def losing(self) -> frozenset[tuple[str, str]]:
        """Return the pairs of models, both ways, of which two jobs lost together: others of these need no trial."""
        pairs = [(_model(self.jobs[a]), _model(self.jobs[b])) for a, b in self.lost if {a, b} <= self.jobs.keys()]
        return frozenset(both for a, b in pairs if a and b for both in ((a, b), (b, a)))


def _model(job: Job) -> str:
    return job.profile.model if job.profile is not None else ""


def _measured(job: Job) -> tuple[float, float] | None:
    """Return a job's utilisation and peak memory on each GPU, None when it must not be packed."""
    profile, lease = job.profile, job.lease
    if profile is None or not _may_pack(lease):
        return None
    if profile.gpu_utilization is None or profile.gpu_memory_peak_gb is None:
        return None
    return profile.gpu_utilization, profile.gpu_memory_peak_gb


def _may_pack(lease: Lease | None) -> bool:
    return lease is not None and (lease.ready or lease.state == "yielded") and lease.state != "stopping"


def _gpus(job: Job) -> frozenset[Gpu]:
    return frozenset(job.lease.gpus) if job.lease is not None else frozenset()


def _rank(unit: _Unit) -> tuple[float, JobKey]:
    return unit.rank


def _joined(stage: _Stage) -> Iterator[Pack]:
    losing = stage.losing()
    for units in stage.places():
        yield from _joined_here(stage, units, losing)


def _joined_here(stage: _Stage, units: list[_Unit], losing: frozenset[tuple[str, str]]) -> Iterator[Pack]:
    """Return the packs on one set of GPUs; ``units`` come with the lowest utilisation first."""
    taken: set[JobKey] = set()
    for unit in units:
        job = unit.jobs[0]
        if len(unit.jobs) > 1 or job.key in taken:
            continue
        free = (other for other in units if other is not unit and other.jobs[0].key not in taken)
        other = next((other for other in free if stage.suits(unit, other, losing)), None)
        if other is not None:
            keys = (job.key, *(theirs.key for theirs in other.jobs))
            taken.update(keys)
            yield Pack(keys, _why(job, other))


def _why(job: Job, other: _Unit) -> str:
    names = job_names(theirs.key for theirs in other.jobs)
    return f"runs with {names} on {gpu_names(_gpus(job))}: of lowest utilisation there, and the memory of all fits"
