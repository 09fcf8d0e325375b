"""The guard of a host's memory where each lane has all of it, so that Slurm's books limit no sum (``Facts.memory_mb``).

A job gets its first lease once the memory that all jobs have asked for fits into the host, or once the memory that they
were seen to use does, with a margin, and one of them could be put out of it. Jobs that come later and fit pass it for
``PATIENCE_S``, then wait for ``BARS_S`` at most. When the host's memory is short all the same, the state of the job
that has waited longest leaves it: for a disk, else for a checkpoint and a requeue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.ipc.memory_use import HostMemory, host_memory, job_bytes, pressure_percent
from cadenza.sidecar.agent.jobs.host_state import MEMORY_MARGIN, Host
from cadenza.sidecar.agent.jobs.job_run import Eviction, JobRun
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.leases.membership import pids_of
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

LOOK_S = 0.5
"""Time between two looks at the host's memory."""
SETTLED_LOOKS, SETTLED_STEPS = 20, 10
"""Looks at a job that has its lease, 10 s at least, and steps of the job, until it counts with the most memory that it
was seen to use; before, it counts with what it has asked for. The steps alone are the job's own word.
"""
PATIENCE_S = 300.0
"""Time for which jobs that came later and fit may pass one that waits for memory, in seconds; then they wait too."""
BARS_S = 600.0
"""Time for which they wait, in seconds: one job that asks for nearly all memory must not keep a host from all others
until those that run there end, which may take days."""
RESERVE = 0.1
"""Part of the jobs' memory below which the host is short of it; twice as much while processes wait for memory."""
PRESSURE_PERCENT = 10.0
"""Part of the last ten seconds in which processes waited for memory (PSI, some avg10) that counts as pressure."""
SAVE_S = 900.0
HOLD_S = 60.0
"""Longest times of an eviction's checkpoint, and of the wait for the requeue after it, in seconds."""
EVICTION_S = 1000.0
"""Longest time of an eviction, in seconds."""
LEAST_FREED = 0.1
"""Part of a job's memory that at least leaves the host with its state, or the job's word on that counts no more."""
NEXT_S = 15.0
"""Time for an eviction to bring memory, in seconds, before the next job has to leave as well."""

Way: TypeAlias = Literal["disk", "requeue"]


# --- decisions (pure) --------------------------------------------------------------------------------------


class Resident(NamedTuple):
    """A job that has had its lease or needs none, in MB."""

    asked_mb: int
    used_mb: int
    """The most that it was seen to use, with the GPU state that it would bring; ``asked_mb`` until that is known."""
    can_leave: bool
    """Its state can go to a disk, or into a checkpoint and a requeue, while it waits."""


class Applicant(NamedTuple):
    """A job that waits for its first lease, in MB."""

    key: JobKey
    asked_mb: int
    used_mb: int
    waited_s: float
    """Time since it asked for its lease; 0 for a job that has not asked yet."""


class Waiting(NamedTuple):
    """A job that has yielded; ``since_s`` is the time of that."""

    since_s: float
    key: JobKey
    on_disk: bool
    spills: bool
    saves: bool


def refusal_reason(
    asked_mb: int, residents: Sequence[Resident], others_mb: int, host_mb: int, margin: float
) -> str | None:
    """Return why a job that has asked for so much memory cannot join the residents; None if it can.

    ``others_mb`` is used by jobs that wait for their first lease as well. A job joins an empty host in any case.
    """
    asked, used = sum(one.asked_mb for one in residents), sum(one.used_mb for one in residents)
    if not residents or asked + others_mb + asked_mb <= host_mb:
        return None
    text = f"host memory: it asked for {asked_mb} MB, and the jobs here for {asked + others_mb} MB of {host_mb} MB"
    if not any(one.can_leave for one in residents):
        return f"{text}; none of them has a disk or a checkpoint to leave for"
    if (used + others_mb) * margin + asked_mb <= host_mb:
        return None
    return f"{text}; they use {used + others_mb} MB (margin {margin:g})"


def admissions(
    applicants: Iterable[Applicant], residents: Iterable[Resident], host_mb: int, margin: float
) -> dict[JobKey, str]:
    """Return for each job, in the order in which they came, the reason why it cannot join; "" if it can.

    A job that joins counts for the next one. Once a job has waited ``PATIENCE_S``, those that came later wait behind it
    for ``BARS_S``.
    """
    queue, there, reasons = list(applicants), list(residents), dict[JobKey, str]()
    others_mb, first = sum(one.used_mb for one in queue), ""
    for one in queue:
        reason = refusal_reason(one.asked_mb, there, others_mb - one.used_mb, host_mb, margin) or first
        reasons[one.key] = reason
        if not reason:
            others_mb -= one.used_mb
            there.append(Resident(one.asked_mb, one.asked_mb, can_leave=False))
        elif not first and 0 <= one.waited_s - PATIENCE_S < BARS_S:
            first = f"host memory: job {one.key} has waited for it for more than {PATIENCE_S:g} s and is the next"
    return reasons


def is_short(memory: HostMemory, host_mb: int, pressure: float) -> bool:
    """Return True if the host has so little memory available that a job has to leave it."""
    reserve = RESERVE * host_mb * (2 if pressure >= PRESSURE_PERCENT else 1)
    return memory.available >> 20 < reserve


def way_out(waiting: Iterable[Waiting]) -> tuple[JobKey, Way] | None:
    """Return the job that leaves the host's memory next, and its way; None if none can.

    That is the one that has waited longest; one whose state is on disk already comes last.
    """
    for one in sorted(waiting, key=lambda one: (one.on_disk, one)):
        if one.spills and not one.on_disk:
            return one.key, "disk"
        if one.saves:
            return one.key, "requeue"
    return None


# --- the host ----------------------------------------------------------------------------------------------


@dataclass
class MemoryGuard:
    """Admits jobs to the host's memory, and evicts them from it, while the service's facts say how much there is."""

    host: Host
    coordinator: StopCoordinator
    memory: Callable[[], HostMemory] = host_memory
    used: Callable[[Iterable[int]], int] = job_bytes
    """Returns the bytes in use by a job's processes."""
    pressure: Callable[[], float] = pressure_percent
    _looked_s: float = float("-inf")

    def tick(self) -> None:
        """Look at the memory of the host and its jobs, admit those that fit, and let one leave if it is short."""
        now = self.host.clock.monotonic()
        if not self.host.facts.memory_mb or now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        # 1. Measure. A container may have less than the node of Slurm claims.
        memory, epoch = self.memory(), self.host.clock.now()
        host_mb = min(self.host.facts.memory_mb, memory.total >> 20)
        residents, applicants = list(self._unleased(host_mb)), list[Applicant]()
        for lease in sorted(self.host.leases, key=lambda one: (one.since_s, one.key)):
            run, used_mb = self.host.run(lease.key), self.used(pids_of(lease)) >> 20
            state_mb = self._gpu_bytes(lease, run) >> 20 if lease.occupying else 0
            run.memory_peak_mb = max(run.memory_peak_mb, used_mb + state_mb)
            run.memory_looks += lease.occupying
            self._compare(lease, run, used_mb)
            if self.host.awaits_memory(lease):
                waited_s = 0.0 if lease.unasked else epoch - lease.since_s
                applicants.append(Applicant(lease.key, self._asked_mb(lease, host_mb), used_mb, waited_s))
            else:
                residents.append(self._resident(lease, run, host_mb))
        # 2. Admit jobs in the order in which they came.
        reasons = admissions(applicants, residents, host_mb, MEMORY_MARGIN)
        for key, reason in reasons.items():
            self.host.run(key).no_memory = reason
        # 3. Where Slurm's limits do not keep the sum below the host's memory, one job after the other leaves it.
        for lease in self.host.leases:
            self._follow(lease, now)
        evictions = [run.eviction for run in self.host.jobs.values() if run.eviction is not None]
        waiting_mb = sum(one.used_mb if reasons[one.key] else one.asked_mb for one in applicants)
        over = sum(one.asked_mb for one in residents) + waiting_mb > host_mb
        if over and all(now - one.began > NEXT_S for one in evictions) and is_short(memory, host_mb, self.pressure()):
            self._evict(memory, host_mb, now)

    def _unleased(self, host_mb: int) -> Iterator[Resident]:
        """Yield the jobs that Slurm has here and that have no lease: nothing but their request is known."""
        # Facts of a service that is silent have jobs that are long gone, which would keep all others waiting.
        for fact in () if self.host.rotating() else self.host.facts.jobs:
            if self.host.leases.get(JobKey(fact.job, fact.restart)) is None:
                yield Resident(fact.memory_mb or host_mb, fact.memory_mb or host_mb, can_leave=False)

    def _resident(self, lease: Lease, run: JobRun, host_mb: int) -> Resident:
        """Return a job that has had its lease, or was admitted and waits for its GPUs."""
        asked_mb = self._asked_mb(lease, host_mb)
        settled = run.memory_looks >= SETTLED_LOOKS and run.telemetry.step >= SETTLED_STEPS
        used_mb = run.memory_peak_mb if settled else max(asked_mb, run.memory_peak_mb)
        believed = run.eviction is None and not run.memory_stays
        return Resident(asked_mb, used_mb, can_leave=believed and (self._spills(lease, run) or self._saves(lease, run)))

    def _compare(self, lease: Lease, run: JobRun, used_mb: int) -> None:
        """Compare the memory of a job whose state is on a disk, as it says, with what it was before."""
        if not run.spilled_from_mb or run.eviction is not None:
            return
        if lease.state != "yielded" or not all(rank.on_disk for rank in run.ranks.values()):
            run.spilled_from_mb = 0
            return
        before, run.memory_stays = run.memory_stays, used_mb > (1 - LEAST_FREED) * run.spilled_from_mb
        if run.memory_stays and not before:
            log.warning("its state is on a disk, says JOBID=%s, and it has %d MB as before", lease.key, used_mb)

    def _asked_mb(self, lease: Lease, host_mb: int) -> int:
        """Return the memory of a job's allocation here; all of the host's if that is not known."""
        fact = self.host.fact_of(lease)
        return (fact and fact.memory_mb) or lease.memory_mb or host_mb

    def _gpu_bytes(self, lease: Lease, run: JobRun) -> int:
        """Return the GPU memory of a holder, which a yield would bring into the host's."""
        watch = self.coordinator.gpus
        seen = watch.last.bytes_of(lease.gpus, pids_of(lease)) if watch is not None else 0
        return max(run.gpu_bytes, seen)

    def _spills(self, lease: Lease, run: JobRun) -> bool:
        """Return True if every rank here says that it can move its state to a disk, and has not tried that yet."""
        able = (rank.hello.spills and rank.session and not rank.on_disk for rank in run.ranks.values())
        return bool(run.ranks) and not lease.frozen and all(able)

    def _saves(self, lease: Lease, run: JobRun) -> bool:
        """Return True if the job can save a checkpoint while it is out, and be requeued with it."""
        fact = self.host.fact_of(lease)
        requeueable = fact is not None and fact.requeueable and not run.requeue_owner
        ready = run.unsavable_reason(lease, self.host.clock.monotonic()) is None
        return requeueable and ready and lease.hosts == 1 and run.can_checkpoint_away and not lease.frozen

    def _evict(self, memory: HostMemory, host_mb: int, now: float) -> None:
        """Let one waiting job leave the host's memory."""
        out = [(lease, self.host.run(lease.key)) for lease in self.host.handled if lease.state == "yielded"]
        found = way_out(
            Waiting(
                lease.since_s,
                lease.key,
                on_disk=any(rank.on_disk for rank in run.ranks.values()),
                spills=self._spills(lease, run),
                saves=self._saves(lease, run),
            )
            for lease, run in out
            if run.stop is None and run.eviction is None and run.ranks and all(rank.out for rank in run.ranks.values())
        )
        if found is None:
            return
        key, way = found
        lease = next(lease for lease, _ in out if lease.key == key)
        reason = f"{memory.available >> 20} MB of the host's {host_mb} MB are left, and it waits"
        if way == "disk":
            self.host.run(key).spilled_from_mb = self.used(pids_of(lease)) >> 20
            self.coordinator.saves.spill(lease, reason)
        else:
            self.host.run(key).eviction = Eviction(reason, now, set())
            self._follow(lease, now)

    def _follow(self, lease: Lease, now: float) -> None:
        """Move an eviction on; Slurm's suspend ends first, as the report asks for it (``LeaseReport.saving``)."""
        run = self.host.run(lease.key)
        eviction = run.eviction
        if eviction is None:
            return
        if lease.occupying or now - eviction.began > EVICTION_S or not run.ranks:
            run.eviction = None
        elif eviction.spilling or run.stop is not None or self.host.shown(lease, LOOK_S) != "running":
            return
        elif refusal := self.coordinator.saves.save(lease, SAVE_S, HOLD_S, "memory"):
            run.note, run.eviction = refusal, None
