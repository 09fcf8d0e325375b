"""The book of an agent that starts: which jobs have which GPUs, by what is on the host and not by what was written.

Jobs start and end while the agent is away, and a job on lane 0 then starts without a lease. So the leases on disk are a
hint of states and virtual times only. The jobs are those of Slurm's steps that run here, with the prolog's word on
their GPUs; the driver names the processes on each GPU. A process that belongs to no lease takes its GPUs until it ends.
"""

from __future__ import annotations

from collections import defaultdict
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
    handovers: tuple[Handover, ...]
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
        starts: defaultdict[int, defaultdict[str, list[Step]]] = defaultdict(lambda: defaultdict(list))
        for step in self.steps:
            if self._is_here(step):
                starts[step.job][step.node].append(step)
        for job, steps_by_node in sorted(starts.items()):
            *earlier, latest = sorted(steps_by_node, key=lambda node: self._start_order(steps_by_node[node]))
            self._leave(job, latest, [steps_by_node[node] for node in earlier])
            if not any(lease.job == job and _same(lease.node, latest) for lease in self.leases):
                self._add(job, steps_by_node[latest])
        # 3. Processes that the driver sees on a GPU, and that belong to no lease there.
        members = {lease.key: pids_of(lease) for lease in self.leases}
        for gpu, pids in sorted(self.on_gpu().items()):
            owners = {pid for lease in self.leases if gpu in lease.gpus for pid in members[lease.key]}
            owners |= {taken.pid for taken in self.taken if gpu in taken.gpus}
            for pid in sorted(set(pids or ()) - owners):
                self._take(pid, frozenset({gpu}))

    def _keep(self, lease: Lease) -> None:
        """Take over a lease from the disk if its job is still there; a stop that was under way is void."""
        lease.processes = lease.running_processes(start_ticks)
        later = any(one.job == lease.job and one.restart > lease.restart for one in self.handovers)
        if not lease.processes and (later or not pids_of(lease)):
            return
        lease.processes = lease.processes or _processes(pids_of(lease))
        lease.state = "held" if lease.state == "stopping" else lease.state
        self._enter(lease)

    def _leave(self, job: int, latest: str, earlier: list[list[Step]]) -> None:
        """Leave their GPUs to the processes of a job's earlier starts until they end: the lease is the latest start's.

        A slurmctld that was killed forgets a start, and starts the job again, maybe on another lane of this host.
        """
        current = self._handover(job, latest)
        kept = [lease for lease in self.leases if lease.job == job and not _same(lease.node, latest)]
        for lease in kept:
            if current is not None and lease.restart == current.restart:
                self.leases.remove(lease)
                self._take_all(pids_of(lease), lease.gpus, job)
        for steps in earlier:
            if not any(lease.node == steps[0].node for lease in kept):
                pids, handover = pids_of(self._of_steps(job, steps)), self._handover(job, steps[0].node)
                self._take_all(pids, handover.gpus if handover is not None else devices_of(pids), job)

    def _add(self, job: int, steps: list[Step]) -> None:
        """Enter a job that started while no agent was there."""
        handover, found = self._handover(job, steps[0].node), self._of_steps(job, steps)
        pids = pids_of(found)
        if not pids:
            return  # its first task waits in the plugin, which registers it
        if handover is None:  # it has no GPUs, or its prolog found no agent: its open device files say which
            # Open device files need no driver's word, and CUDA keeps them open for as long as it is used.
            if gpus := devices_of(pids):
                self._take(min(pids), gpus, job)
            return
        found.uid = handover.uid if handover.uid is not None else uid_of(min(pids))
        found.restart, found.gpus, found.node = handover.restart, handover.gpus, handover.node
        found.hosts, found.lane = max(handover.hosts, 1), handover.lane
        found.managed = handover.shares or handover.lane > 0
        found.processes, found.held_since_s = _processes(pids), self.now_s
        found.state = "yielded" if look_at(found) == "frozen" else "held"
        self._enter(found)

    def _of_steps(self, job: int, steps: list[Step]) -> Lease:
        """Return a lease on no GPU, with a job's processes below some steps."""
        stepds = tuple(Process(step.pid, step.start_ticks) for step in steps)
        group = next((step.group for step in steps if step.group), "")
        return Lease(job, 0, 0, (), self.now_s, group=group, stepds=stepds)

    def _enter(self, lease: Lease) -> None:
        """Enter a lease; where another one holds its GPUs already, the job runs there without."""
        others = [other for other in self.leases if other.occupying and other.overlaps(lease)]
        if lease.occupying and any(not (other.packed_with(lease) or (other.loose and lease.loose)) for other in others):
            lease.state = "waiting"
            self._take_all(pids_of(lease), lease.gpus, lease.job)
        self.leases.append(lease)

    def _take_all(self, pids: Iterable[int], gpus: Iterable[int], job: int) -> None:
        """Note that processes of a job have its GPUs without a lease."""
        for pid in sorted(pids):
            self._take(pid, frozenset(gpus), job)

    def _take(self, pid: int, gpus: frozenset[int], job: int = 0) -> None:
        """Note that a process has GPUs without a lease."""
        if (ticks := start_ticks(pid)) is not None:
            self.taken.append(Taken(pid, ticks, gpus, job))

    def _handover(self, job: int, node: str) -> Handover | None:
        """Return the prolog's word on a job's start on a node, or on any where the node is not known."""
        found = [one for one in self.handovers if one.job == job and _same(one.node, node)]
        return max(found, key=lambda one: one.restart, default=None)

    def _start_order(self, steps: list[Step]) -> tuple[int, int]:
        """Return the order of a job's starts: its restart count, then the time of the last step in ticks."""
        handover = self._handover(steps[0].job, steps[0].node)
        return handover.restart if handover is not None else -1, max(step.start_ticks for step in steps)

    def _is_here(self, step: Step) -> bool:
        """Return True for a step of one of this host's nodes: daemons of several hosts may share a machine."""
        name = step.node
        return (
            not name
            or name == self.host
            or name.startswith(f"{self.host}-l")
            or any(one.job == step.job and one.node == name for one in self.handovers)
            or any(lease.node == name for lease in self.saved)
        )


def _same(node: str, other: str) -> bool:
    """Return True if two names of nodes may be one node's: an unknown name is empty."""
    return node == other or "" in (node, other)


def _processes(pids: Iterable[int]) -> tuple[Process, ...]:
    """Return processes with their start times; those that are gone are left out."""
    return tuple(Process(pid, ticks) for pid in sorted(pids) if (ticks := start_ticks(pid)) is not None)
