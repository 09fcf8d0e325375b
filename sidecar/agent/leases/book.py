"""The book of an agent that starts: which jobs have which GPUs, by what is on the host and not by what was written.

Jobs start and end while the agent is away, and a job on lane 0 then starts without a lease. So the leases on disk are a
hint of states and virtual times only. The jobs are those of Slurm's steps that run here, with the prolog's word on
their GPUs; the driver names the processes on each GPU. A process that belongs to no lease takes its GPUs until it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cadenza.sidecar.agent.ipc.processes import start_ticks, uid_of
from cadenza.sidecar.agent.ipc.slurm_steps import Step, devices_of
from cadenza.sidecar.agent.leases.handover import Handover
from cadenza.sidecar.agent.leases.lease_table import Lease, Process
from cadenza.sidecar.agent.leases.membership import look_at, pids_of


@dataclass(frozen=True)
class Taken:
    """GPUs in use by a process that has no lease on them, until it ends; ``job`` is 0 if Slurm does not know it."""

    pid: int
    start_ticks: int
    gpus: frozenset[int]
    job: int = 0
    since_s: float = float("-inf")
    """Monotonic time at which its job left; long ago for a process that was found when the agent started."""
    early: bool = False
    """Its job has not had its lease yet, and frees the GPUs like any other job once it has had it."""

    @property
    def there(self) -> bool:
        """True while the process lives."""
        return start_ticks(self.pid) == self.start_ticks

    def __str__(self) -> str:
        whose = f"job {self.job}" if self.job else "no job that is known"
        return f"pid {self.pid} of {whose} uses GPU {','.join(map(str, sorted(self.gpus)))} without a lease"


@dataclass
class Book:
    """Everything that an agent finds when it starts; ``on_gpu`` returns the driver's processes by GPU."""

    host: str
    saved: tuple[Lease, ...]
    handovers: Mapping[int, Handover]
    steps: tuple[Step, ...]
    on_gpu: Callable[[], Mapping[int, Iterable[int] | None]]
    now_s: float
    leases: list[Lease] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)

    def rebuild(self) -> None:
        """Fill ``leases`` and ``taken``."""
        # 1. Leases on disk whose jobs still have processes here.
        for lease in self.saved:
            self._keep(lease)
        # 2. Jobs that Slurm runs here and that no lease on disk knows: root's prolog says which GPUs they have.
        by_job: dict[int, list[Step]] = {}
        for step in self.steps:
            if self._is_here(step):
                by_job.setdefault(step.job, []).append(step)
        for job in sorted(by_job.keys() - {lease.job for lease in self.leases}):
            self._add(job, by_job[job])
        # 3. Processes that the driver sees on a GPU, and that belong to no lease there.
        members = {lease.job: pids_of(lease) for lease in self.leases}
        for gpu, pids in sorted(self.on_gpu().items()):
            owners = {pid for lease in self.leases if gpu in lease.gpus for pid in members[lease.job]}
            for pid in sorted(set(pids or ()) - owners):
                self._take(pid, frozenset({gpu}))

    def _keep(self, lease: Lease) -> None:
        """Take over a lease from the disk if its job is still there; a stop that was under way is void."""
        handover = self.handovers.get(lease.job)
        lease.processes = lease.running_processes(start_ticks)
        later = handover is not None and handover.restart > lease.restart
        if not lease.processes and (later or not pids_of(lease)):
            return
        lease.processes = lease.processes or _processes(pids_of(lease))
        lease.state = "held" if lease.state == "stopping" else lease.state
        self._enter(lease)

    def _add(self, job: int, steps: list[Step]) -> None:
        """Enter a job that started while no agent was there."""
        handover = self.handovers.get(job)
        stepds = tuple(Process(step.pid, step.start_ticks) for step in steps)
        group = next((step.group for step in steps if step.group), "")
        found = Lease(job, 0, 0, (), self.now_s, group=group, stepds=stepds)
        pids = pids_of(found)
        if not pids:
            return  # its first task waits in the plugin, which registers it
        if handover is None:  # it has no GPUs, or its prolog found no agent: its open device files say which
            if gpus := devices_of(pids):
                self._take(min(pids), gpus, job)
            return
        found.uid = handover.uid if handover.uid is not None else uid_of(min(pids))
        found.restart, found.gpus, found.node = handover.restart, handover.gpus, handover.node
        found.hosts, found.lane = max(handover.hosts, 1), handover.lane
        found.managed = handover.shares or handover.lane > 0
        found.processes, found.registered_s, found.held_since_s = _processes(pids), self.now_s, self.now_s
        found.state = "yielded" if look_at(found) == "frozen" else "held"
        self._enter(found)

    def _enter(self, lease: Lease) -> None:
        """Enter a lease; where another one holds its GPUs already, the job runs there without."""
        others = [other for other in self.leases if other.occupying and other.overlaps(lease)]
        if lease.occupying and any(not (other.packed_with(lease) or (other.loose and lease.loose)) for other in others):
            lease.state = "waiting"
            for pid in pids_of(lease):
                self._take(pid, frozenset(lease.gpus), lease.job)
        self.leases.append(lease)

    def _take(self, pid: int, gpus: frozenset[int], job: int = 0) -> None:
        """Note that a process has GPUs without a lease."""
        if (ticks := start_ticks(pid)) is not None:
            self.taken.append(Taken(pid, ticks, gpus, job))

    def _is_here(self, step: Step) -> bool:
        """Return True for a step of one of this host's nodes: daemons of several hosts may share a machine."""
        handover = self.handovers.get(step.job)
        name = step.node
        return (
            not name
            or name == self.host
            or name.startswith(f"{self.host}-l")
            or (handover is not None and handover.node == name)
            or any(lease.node == name for lease in self.saved)
        )


def _processes(pids: Iterable[int]) -> tuple[Process, ...]:
    """Return processes with their start times; those that are gone are left out."""
    return tuple(Process(pid, ticks) for pid in sorted(pids) if (ticks := start_ticks(pid)) is not None)
