"""Leases on simulated GPUs: which job may use which GPU now, as the agents keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from cadenza.policies.core.errors import SimulationError
from cadenza.policies.core.model import Gpu, JobKey, Node, Placement
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.simulator.job import SimJob, SimLease

Pairs = Mapping[tuple[str, str], tuple[float, float]]


class Changes(NamedTuple):
    """Jobs that stop and then jobs that run, each with the part of its speed alone that its co-runners leave it."""

    stops: tuple[SimJob, ...] = ()
    runs: tuple[tuple[SimJob, float], ...] = ()


class Leases:
    """Leases on the GPUs of all hosts. A GPU has one holder, or several that are packed.

    Every method changes the leases and returns the jobs that stop and run because of it; the world applies that.
    """

    def __init__(self, nodes: Mapping[str, Node], costs: SimCosts, interference: Pairs, *, check_hosts: bool) -> None:
        self._nodes = dict(nodes)
        self._costs = costs
        self._interference = interference
        self._check_hosts = check_hosts
        """False where Slurm's books bound the CPUs and memory of a host's jobs; tuning may pass these until a round."""
        self._jobs: dict[JobKey, SimJob] = {}
        self._holders: dict[Gpu, list[SimJob]] = {}
        self._held: Counter[str] = Counter()
        """GPUs that have a holder, by host."""
        self._doubled: set[Gpu] = set()
        """GPUs that have several."""
        self._stopping: dict[JobKey, SimJob] = {}
        """Holders that stand for a checkpoint; all others run."""
        self._computes = True
        """True if no job is known to leave its GPUs idle while it runs."""
        self._allocated: dict[str, set[int]] = {name: set() for name in nodes}
        """GPU indices that Slurm has allocated, by lane."""
        self._on_host: dict[str, set[JobKey]] = {}
        self._changed = False
        """True if a lease or the shares of a holder changed since the last check."""

    @property
    def jobs(self) -> Iterable[SimJob]:
        """Return the jobs with a lease."""
        return self._jobs.values()

    # --- The leases of a job, from its start to its end ----------------------------------------------

    def enter(self, job: SimJob, now_s: float) -> Changes:
        """Register a started job; it gets its GPUs at once when they are free."""
        self._jobs[job.key] = job
        self._computes &= job.gpu_utilization == 1.0
        self._assign(job, job.placement)
        mine = set(job.gpus_held)
        neighbors = (self._jobs[key] for share in job.placement for key in self._on_host[self._nodes[share.node].host])
        virtual_times = [
            other.lease.vtime_s + (now_s - other.lease.since_s if other.lease.holds else 0.0)
            for other in neighbors
            if other is not job and other.lease is not None and not mine.isdisjoint(other.gpus_held)
        ]
        job.lease = SimLease(now_s, min(virtual_times, default=0.0))
        job.changed()
        return Changes() if self._others(job) else self.give(job, now_s)

    def leave(self, job: SimJob, now_s: float) -> Changes:
        """Forget a job."""
        if job.lease is None:
            return Changes()
        changes = self._release(job, now_s)
        self._unassign(job)
        for partner in self._partners(job):
            partner.packed.discard(job.key)
        job.packed.clear()
        job.lease = None
        del self._jobs[job.key]
        return changes

    def give(self, job: SimJob, now_s: float) -> Changes:
        """Give a job its GPUs, unless a job that is not packed with it has one of them."""
        lease = job.lease
        if lease is None or any(other.key not in job.packed for other in self._others(job)):
            return Changes()
        if lease.state == "held":
            return Changes()
        if lease.state == "stopping":
            lease.state = "held"
            del self._stopping[job.key]
            return self._pace(job, now_s)
        if lease.state == "yielded":
            job.waiting_cost_s += self._costs.resume_s + self._copy_s(job)
        lease.state, lease.since_s = "held", now_s
        lease.co_runners, lease.co_runners_since_s = (), now_s
        for gpu in job.gpus_held:
            self._hold(gpu, job)
        return self._pace(job, now_s)

    def take(self, job: SimJob, now_s: float) -> Changes:
        """Move a holder's state to the host and free its GPUs."""
        if job.lease is None or job.lease.state != "held":
            return Changes()
        job.yields += 1
        changes = self._release(job, now_s)
        job.waiting_cost_s += self._costs.yield_s + self._copy_s(job)
        return changes

    def stop(self, job: SimJob, now_s: float) -> Changes:
        """Stop a holder at a boundary for a checkpoint; it keeps its GPUs."""
        if job.lease is None or job.lease.state != "held":
            return Changes()
        job.lease.remember_rate(job, now_s)
        job.lease.state = "stopping"
        self._stopping[job.key] = job
        return Changes((job,), tuple(self._run(other, now_s) for other in self._others(job, running=True)))

    def vacate(self, job: SimJob, now_s: float) -> Changes:
        """Let a job leave its GPUs, for others that come before it gets new ones."""
        changes = self._release(job, now_s)
        self._unassign(job)
        return changes

    def relocate(self, job: SimJob, placement: Placement, now_s: float) -> Changes:
        """Put a job on other GPUs; it has to get them anew."""
        changes = self.vacate(job, now_s)
        self._assign(job, placement)
        job.changed()
        return changes

    def settle(self, job: SimJob, now_s: float) -> Changes:
        """Bring a job's speed up to date after its shares changed, or give it free GPUs."""
        self._changed = True
        if job.lease is not None and job.lease.state == "held":
            return self._pace(job, now_s)
        return Changes() if self._others(job) else self.give(job, now_s)

    def pack(self, keys: Iterable[JobKey]) -> None:
        """Allow jobs to hold the same GPUs at once."""
        jobs = [self._jobs[key] for key in keys if key in self._jobs]
        for job in jobs:
            job.packed |= {other.key for other in jobs if other is not job}

    def unpack(self, job: SimJob, now_s: float) -> Changes:
        """Let a packed job take turns again; it gives way now."""
        self._changed = True
        for partner in self._partners(job):
            partner.packed.discard(job.key)
        job.packed.clear()
        if any(other is not job for gpu in job.gpus_held for other in self._holders.get(gpu, ())):
            return self.take(job, now_s)
        return Changes()

    # --- Inside -------------------------------------------------------------------------------------

    def _release(self, job: SimJob, now_s: float) -> Changes:
        lease = job.lease
        if lease is None or not lease.holds:
            return Changes()
        if lease.state == "held":
            lease.remember_rate(job, now_s)
        lease.vtime_s += now_s - lease.since_s
        lease.state, lease.since_s = "yielded", now_s
        self._stopping.pop(job.key, None)
        for gpu in job.gpus_held:
            self._let_go(gpu, job)
        return Changes((job,), tuple(self._run(other, now_s) for other in self._others(job, running=True)))

    def _hold(self, gpu: Gpu, job: SimJob) -> None:
        holders = self._holders.setdefault(gpu, [])
        holders.append(job)
        if len(holders) == 1:
            self._held[gpu.host] += 1
        else:
            self._doubled.add(gpu)

    def _let_go(self, gpu: Gpu, job: SimJob) -> None:
        holders = self._holders[gpu]
        holders.remove(job)
        if not holders:
            self._held[gpu.host] -= 1
        elif len(holders) == 1:
            self._doubled.discard(gpu)

    def _pace(self, job: SimJob, now_s: float) -> Changes:
        self._changed = True
        return Changes((), tuple(self._run(member, now_s) for member in (job, *self._others(job, running=True))))

    def _run(self, job: SimJob, now_s: float) -> tuple[SimJob, float]:
        """Return a holder with the part of its speed alone that it keeps next to the present co-runners."""
        others = self._others(job, running=True)
        co_runners = tuple(other.key for other in others)
        if job.lease is not None and co_runners != job.lease.co_runners:
            job.lease.co_runners, job.lease.co_runners_since_s = co_runners, now_s
        factor = 1.0
        for other in others:
            mine, theirs = job.trace.model, other.trace.model
            if (mine, theirs) in self._interference:
                factor *= self._interference[mine, theirs][0]
            elif (theirs, mine) in self._interference:
                factor *= self._interference[theirs, mine][1]
            else:
                factor *= 0.5
        return job, factor

    def _others(self, job: SimJob, *, running: bool = False) -> list[SimJob]:
        """Return the other holders of a job's GPUs, in order of keys; ``running``: without those that stop."""
        found = {
            other.key: other
            for gpu in job.gpus_held
            for other in self._holders.get(gpu, ())
            if other is not job and not (running and other.lease is not None and other.lease.state == "stopping")
        }
        return [found[key] for key in sorted(found)]

    def _partners(self, job: SimJob) -> list[SimJob]:
        return [self._jobs[key] for key in sorted(job.packed) if key in self._jobs]

    def _copy_s(self, job: SimJob) -> float:
        size_gb = job.truth.gpu_memory_low_gb if job.truth is not None else None
        return (size_gb or 0.0) / self._costs.copy_gb_s

    def _assign(self, job: SimJob, placement: Placement) -> None:
        """Allocate GPUs as Slurm does: the lowest free ones of each lane."""
        gpus: list[Gpu] = []
        for share in placement:
            node = self._nodes[share.node]
            taken = self._allocated[share.node]
            free = [index for index in range(node.gpus) if index not in taken][: share.gpus]
            taken.update(free)
            gpus += [Gpu(node.host, index) for index in free]
            self._on_host.setdefault(node.host, set()).add(job.key)
        job.gpus_held = tuple(gpus)
        self._changed = True

    def _unassign(self, job: SimJob) -> None:
        by_host: dict[str, set[int]] = {}
        for gpu in job.gpus_held:
            by_host.setdefault(gpu.host, set()).add(gpu.index)
        for share in job.placement:
            host = self._nodes[share.node].host
            self._allocated[share.node] -= by_host.get(host, set())
            self._on_host[host].discard(job.key)
        job.gpus_held = ()

    # --- Figures and checks ---------------------------------------------------------------------------

    def use(self) -> tuple[int, float]:
        """Return the number of GPUs that have a holder, and the number of those that compute."""
        held = self._held.total()
        if self._computes:  # nearly always
            gpus = {gpu for job in self._stopping.values() for gpu in job.gpus_held}
            return held, float(held - sum(not any(job.running for job in self._holders[gpu]) for gpu in gpus))
        holders = filter(None, self._holders.values())
        return held, sum(min(1.0, sum(job.gpu_utilization for job in jobs if job.running)) for jobs in holders)

    def held_by_host(self) -> Counter[str]:
        """Return the number of GPUs that have a holder, by host."""
        return self._held

    def check(self) -> None:
        """Raise SimulationError when a host has less than its jobs were given.

        Two holders of a GPU that are not packed are an AssertionError: a bug of this simulator, not of a policy.
        """
        if not self._changed:
            return
        self._changed = False
        for gpu in self._doubled:
            jobs = self._holders[gpu]
            for key, times in Counter(job.key for job in jobs).items():
                others = {other.key for other in jobs if other.key != key}
                if times > 1 or not others <= self._jobs[key].packed:
                    raise AssertionError(f"{gpu} has holders {[str(other.key) for other in jobs]}")
        taken: dict[str, tuple[int, int]] = {}
        for job in self._jobs.values() if self._check_hosts else ():
            holds = job.lease is not None and job.lease.state == "held"
            for share in job.placement:
                host = self._nodes[share.node].host
                cpus, memory_mb = taken.get(host, (0, 0))
                taken[host] = (cpus + (share.cpus if holds else 0), memory_mb + share.memory_mb)
        for host, (cpus, memory_mb) in taken.items():
            node = self._nodes[host]
            if cpus > node.cpus or memory_mb > node.memory_mb:
                raise SimulationError(
                    f"the holders of GPUs of {host} were given {cpus} of {node.cpus} CPUs, and all its jobs "
                    f"{memory_mb} of {node.memory_mb} MB"
                )
