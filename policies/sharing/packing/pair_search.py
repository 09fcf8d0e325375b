"""Packing with undo (Gandiva, OSDI'18, §4): jobs that leave a GPU idle run on it together, if that pays.

A job first runs alone, which gives its profile: the time of an iteration. Then the job with
the lowest GPU utilization joins the one with the next lowest on its GPUs, if the GPU memory of both fits with a margin
and the host has the CPUs and the memory; when their throughput together is no better than that of turns (see
``judging``), it leaves again and the pair is remembered for a while; the next lowest is tried then. A pair that a
measured pair of profiles says to lose is not tried. Nothing else is predicted: a wrong profile costs one trial. Only
jobs of one node are packed: those of several stop by orders of the service only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cadenza.policies.core.actions import Pack, Unpack
from cadenza.policies.core.decision import Alone, Lost, SharingMemory
from cadenza.policies.core.model import Gpu, Job, JobKey
from cadenza.policies.core.profile import least_cpus
from cadenza.policies.core.text import gpu_names, job_names
from cadenza.policies.sharing.board.host import HostState
from cadenza.policies.sharing.state.groups import Group, after, group_keys, partners, standing
from cadenza.policies.sharing.state.measurement import Rule, alone, evaluate, packed_text
from cadenza.policies.sharing.state.round_state import RoundState, holds
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs and unpacks of a round, and the measurements behind them."""

    actions: tuple[Pack | Unpack, ...]
    before: tuple[Group, ...]
    """The packs as they are now."""
    packs: tuple[Group, ...]
    """The packs once ``actions`` are done."""
    lost: tuple[Lost, ...]
    alone: tuple[Alone, ...]
    reasons: Mapping[JobKey, str]
    """A sentence for every job that is packed, or just was."""

    def leaving(self, jobs: Mapping[JobKey, Job]) -> frozenset[JobKey]:
        """Return the jobs that give up GPUs because a job that they leave holds the same ones."""
        left = partners(self.before)
        gone = [action.job for action in self.actions if isinstance(action, Unpack)]
        return frozenset(key for key in gone if holds(jobs[key]) and any(holds(jobs[other]) for other in left[key]))


@dataclass(frozen=True, slots=True)
class Terms:
    """Conditions of packing besides the jobs."""

    time_s: float
    sharing: SharingSettings
    gandiva: GandivaSettings
    hosts: Mapping[str, HostState]
    gpu_memory_gb: Mapping[str, float]
    """By host; a host without an entry has GPUs of unknown memory."""
    overloaded: bool
    """True if jobs take turns anywhere (more GPUs allocated than there are)."""

    @property
    def rule(self) -> Rule:
        """Return when a measurement counts."""
        return Rule.under(self.sharing, self.gandiva)


def pack_and_unpack(state: RoundState) -> None:
    """Undo packs that do not pay, and pack jobs that probably do."""
    sizes = {node.host: node.gpu_memory_gb for node in state.snapshot.nodes if node.gpu_memory_gb is not None}
    overloaded = any(host.overcommit > 1 or host.gpus_wanted > host.gpus for host in state.where.hosts.values())
    terms = Terms(state.now_s, state.settings, state.gandiva, state.where.hosts, sizes, overloaded=overloaded)
    _apply(state, packing(state.jobs.ours, state.memory.sharing, terms))


def end_packs(state: RoundState) -> None:
    """Let jobs that an earlier setting packed take turns again."""
    if state.who.groups:
        ended = [(key, group) for group in state.who.groups for key in group[:-1]]
        undone = tuple(
            Unpack(key, f"runs in turns with {job_names(set(group) - {key})} again: packing is off")
            for key, group in ended
        )
        memory = state.memory.sharing
        reasons = {action.job: action.reason for action in undone}
        _apply(state, Packing(undone, state.who.groups, (), memory.lost, memory.alone, reasons))


def _apply(state: RoundState, packed: Packing) -> None:
    state.outcome.pack_actions, state.who.stopping = packed.actions, packed.leaving(state.jobs.ours)
    state.who.groups, state.who.packed = packed.packs, group_keys(packed.packs)
    for key, reason in packed.reasons.items():
        state.outcome.say("pack", key, reason)
    state.where.fixed |= {key for a in packed.actions for key in (a.jobs if isinstance(a, Pack) else (a.job,))}
    state.remember(packs=packed.before, lost=packed.lost, alone=packed.alone)


def packing(jobs: Mapping[JobKey, Job], memory: SharingMemory, terms: Terms) -> Packing:
    """Return this round's packs and unpacks. ``jobs``: those that sharing manages and that agents know."""
    before = standing(memory.packs, jobs)
    rows = alone(jobs, memory, terms.rule)
    measured = {pack: evaluate([jobs[key] for key in pack], rows, terms.rule) for pack in before}
    undone = tuple(
        Unpack(pack[0], f"runs in turns with {job_names(pack[1:])} again: {one.text}")
        for pack, one in measured.items()
        if one.speed is not None and not terms.rule.pays_off(one.speed)
    )
    lost = _losers(jobs, memory, before, undone, terms)
    packs = after(before, undone)
    joined: tuple[Pack, ...] = ()
    # Gandiva packs under overload only (OSDI'18, page 601): else jobs have GPUs of their own.
    if terms.overloaded:
        stage = _Stage(jobs, packs, rows, lost, terms)
        losing = stage.losing()
        joined = tuple(pack for here in stage.places() for pack in _joined_here(stage, here, losing))
    packs = after(packs, joined)
    actions: tuple[Pack | Unpack, ...] = (*undone, *joined)
    # A job of a pack hears what was done to it, else what was measured of it.
    reasons = {key: packed_text(key, one) for pack, one in measured.items() if pack in packs for key in pack}
    for action in actions:
        reasons.update((key, action.reason) for key in (action.jobs if isinstance(action, Pack) else (action.job,)))
    return Packing(actions, before, packs, lost, tuple(sorted(rows.values())), reasons)


def _pair(one: JobKey, other: JobKey) -> tuple[JobKey, JobKey]:
    return (min(one, other), max(one, other))


# --- Undo ----------------------------------------------------------------------------------------------


def _losers(
    jobs: Mapping[JobKey, Job],
    memory: SharingMemory,
    before: Iterable[Group],
    undone: Iterable[Unpack],
    terms: Terms,
) -> tuple[Lost, ...]:
    """Return the pairs that are not to be tried, those that were just found included."""
    kept = [pair for pair in memory.lost if terms.time_s - pair.at_s < terms.gandiva.pack_again_s]
    pairs = {_pair(action.job, other) for action in undone for other in partners(before)[action.job]}
    lost = [Lost(a, b, terms.time_s, _model(jobs[a]), _model(jobs[b])) for a, b in pairs]
    return tuple(sorted(lost + [pair for pair in kept if pair[:2] not in pairs]))


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
        """Return the sort key: the lowest utilization first."""
        return self.utilization, min(job.key for job in self.jobs)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Everything that a choice depends on."""

    jobs: Mapping[JobKey, Job]
    packs: tuple[Group, ...]
    alone: Mapping[JobKey, Alone]
    lost: tuple[Lost, ...]
    terms: Terms

    def places(self) -> list[list[_Unit]]:
        """Return the units on each set of GPUs that has several, the lowest utilization first.

        A unit counts once all its jobs have been measured.
        """
        packed = {key for pack in self.packs for key in pack}
        there: dict[frozenset[Gpu], list[Group]] = {}
        for group in (*self.packs, *((key,) for key in sorted(self.jobs) if key not in packed)):
            there.setdefault(frozenset(self.jobs[group[0]].leased_gpus), []).append(group)
        several = [groups for groups in there.values() if len(groups) > 1]
        units = [[unit for group in groups if (unit := self._unit(group)) is not None] for groups in several]
        places = [sorted(here, key=lambda unit: unit.rank) for here in units if len(here) > 1]
        return sorted(places, key=lambda here: here[0].rank)

    def _unit(self, group: Group) -> _Unit | None:
        rows = ((key, self.alone[key]) for key in group if key in self.alone)
        measured = [size for key, row in rows if (size := _measured(self.jobs[key], row)) is not None]
        if len(measured) != len(group):
            return None
        members = tuple(self.jobs[key] for key in group)
        return _Unit(
            members, sum(row[0] for row in measured), sum(row[1] for row in measured), tuple(map(_model, members))
        )

    def suits(self, job: _Unit, other: _Unit, losing: frozenset[tuple[str, str]]) -> bool:
        """Return True if one job may join a unit."""
        mine, model = job.jobs[0], job.models[0]
        if len(other.jobs) >= self.terms.gandiva.max_packed or any((model, name) in losing for name in other.models):
            return False
        rule, together = self.terms.rule, mine.profile.together if mine.profile is not None else {}
        if any(name in together and not rule.pays_off(together[name]) for name in other.models):
            return False
        return self._fits(job, other) and all(self._together(mine, theirs) for theirs in other.jobs)

    def _fits(self, job: _Unit, other: _Unit) -> bool:
        """Return True if the GPUs have the memory for both, and their hosts CPUs and memory."""
        gpus = job.jobs[0].leased_gpus
        size_gb = min((self.terms.gpu_memory_gb.get(gpu.host, 0.0) for gpu in gpus), default=0.0)
        if job.peak_gb + other.peak_gb > size_gb * (1 - self.terms.gandiva.gpu_memory_margin):
            return False
        hosts = [self.terms.hosts[name] for name in sorted({gpu.host for gpu in gpus}) if name in self.terms.hosts]
        return all(self._has_room(host, (*job.jobs, *other.jobs)) for host in hosts)

    def _has_room(self, host: HostState, unit: tuple[Job, ...]) -> bool:
        """Return True if a host has the memory promised to its jobs, and the CPUs that all running jobs then need."""
        keys, gpus = {job.key for job in unit}, set(unit[0].leased_gpus)
        others = (t.job for key, t in host.residents.items() if key not in keys and holds(t.job))
        running = (*unit, *(job for job in others if gpus.isdisjoint(job.leased_gpus)))
        needed = sum(_cpus(job, self.alone.get(job.key), host.lanes[0].gpu_type) for job in running)
        return host.committed_mb <= host.memory_mb and needed <= host.lanes[0].cpus

    def _together(self, mine: Job, theirs: Job) -> bool:
        sharing = self.terms.sharing
        return (
            (sharing.share_between_users or mine.user == theirs.user)
            and sharing.priority(mine) == sharing.priority(theirs)
            and all(_pair(mine.key, theirs.key) != pair[:2] for pair in self.lost)
        )

    def losing(self) -> frozenset[tuple[str, str]]:
        """Return the pairs of models, both ways, of which two jobs lost together: others of these need no trial."""
        pairs = [(pair.model, pair.other_model) for pair in self.lost if pair.model and pair.other_model]
        return frozenset(both for a, b in pairs for both in ((a, b), (b, a)))


def _model(job: Job) -> str:
    return job.profile.model if job.profile is not None else ""


def _measured(job: Job, row: Alone) -> tuple[float, float] | None:
    """Return a job's utilization and peak memory on each GPU, None when it must not be packed.

    The GPU driver's utilization comes before the profile's. Without both, a GPU is idle at least while the job waits in
    its loader. Of several memory figures the largest counts; a job without any is not packed.
    """
    profile = job.profile
    sizes = [row.gpu_memory_gb, profile.gpu_memory_peak_gb if profile is not None else None]
    peaks = [size for size in sizes if size is not None]
    lease = job.lease
    stops = lease is not None and (lease.ready or lease.state == "yielded") and lease.state != "stopping"
    if not peaks or job.num_nodes > 1 or not stops:
        return None
    if row.busy is not None:
        return row.busy, max(peaks)
    utilization = profile.gpu_utilization if profile is not None else None
    return 1.0 - row.data_wait if utilization is None else utilization, max(peaks)


def _cpus(job: Job, row: Alone | None, gpu_type: str) -> float:
    """Return the CPUs that a job needs on each of its hosts: by its profile, else what it used, else what it asked."""
    if job.profile is not None:
        needed: float = least_cpus(job.profile.on(gpu_type), max(job.gpus, 1), job.cpus, job.memory_mb)
    else:
        needed = job.cpus if row is None or row.cpus is None else min(row.cpus, job.cpus)
    return needed / max(job.num_nodes, 1)


def _joined_here(stage: _Stage, units: list[_Unit], losing: frozenset[tuple[str, str]]) -> Iterator[Pack]:
    """Return the packs on one set of GPUs; ``units`` come with the lowest utilization first."""
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
            place = f"runs with {job_names(keys[1:])} on {gpu_names(job.leased_gpus)}"
            yield Pack(keys, f"{place}: of lowest utilization there, and the memory of all fits")
