"""Turns on simulated GPUs: which job may use which GPU now, as the agents would keep it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cadenza.policies.core.errors import SimulationError
from cadenza.policies.core.model import Gpu, JobKey, Node, Placement
from cadenza.policies.simulator.job import LeaseBook

if TYPE_CHECKING:
    from cadenza.policies.simulator.job import Live
    from cadenza.policies.simulator.world import World


class Leases:
    """Leases on the GPUs of all hosts; a GPU has one holder, or several that are packed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._holders: dict[Gpu, list[Live]] = {}
        self._given: dict[str, set[int]] = {name: set() for name in world.nodes}
        """GPU indices that Slurm has given out, by lane."""
        self._on_host: dict[str, set[JobKey]] = {}

    # --- A job's way --------------------------------------------------------------------------------

    def enter(self, job: Live) -> None:
        """Register a started job; it gets its GPUs at once when they are free."""
        self._assign(job, job.placement)
        job.lease = LeaseBook(self.world.now_s, self._least_vtime(job))
        job.changed()
        if not self._others(job):
            self.give(job)

    def leave(self, job: Live) -> None:
        """Forget a job."""
        if job.lease is None:
            return
        self._release(job)
        self._unassign(job)
        for partner in self._partners(job):
            partner.packed.discard(job.key)
        job.packed.clear()
        job.lease = None

    def give(self, job: Live) -> bool:
        """Give a job its GPUs; False when somebody who is not packed with it has one of them."""
        book = job.lease
        if book is None or any(other.key not in job.packed for other in self._others(job)):
            return False
        if book.state != "held":
            self._resume_cost(job)
            book.state, book.since_s = "held", self.world.now_s
            book.beside, book.company_s = (), self.world.now_s
            for gpu in job.gpus_held:
                self._holders.setdefault(gpu, []).append(job)
            self._pace(job)
        return True

    def take(self, job: Live) -> None:
        """Move a holder's state to the host and free its GPUs."""
        if job.lease is None or job.lease.state != "held":
            return
        job.yields += 1
        self._release(job)
        job.waiting_cost_s += self.world.setup.costs.yield_s + self._copy_s(job)

    def vacate(self, job: Live) -> None:
        """Let a job leave its GPUs, for others that come before it gets new ones."""
        self._release(job)
        self._unassign(job)

    def relocate(self, job: Live, placement: Placement) -> None:
        """Put a job on other GPUs; it has to get them anew."""
        self.vacate(job)
        self._assign(job, placement)
        job.changed()

    def settle(self, job: Live) -> None:
        """Bring a job's speed up to date after its shares changed, or give it free GPUs."""
        if job.lease is not None and job.lease.state == "held":
            self._pace(job)
        elif not self._others(job):
            self.give(job)

    def pack(self, keys: Iterable[JobKey]) -> None:
        """Allow jobs to hold the same GPUs at once."""
        jobs = [self.world.live[key] for key in keys]
        for job in jobs:
            job.packed |= {other.key for other in jobs if other is not job}

    def unpack(self, job: Live) -> None:
        """Let a packed job take turns again; it gives way now."""
        partners = self._partners(job)
        for partner in partners:
            partner.packed.discard(job.key)
        job.packed.clear()
        if any(other is not job for gpu in job.gpus_held for other in self._holders.get(gpu, ())):
            self.take(job)

    # --- Inside -------------------------------------------------------------------------------------

    def _release(self, job: Live) -> None:
        book = job.lease
        if book is None or book.state != "held":
            return
        now_s = self.world.now_s
        book.vtime_s += now_s - book.since_s
        book.iteration_s = job.trace.iteration_s / job.rate if job.rate else book.iteration_s
        book.pace = job.pace(now_s)
        book.state, book.since_s = "yielded", now_s
        for gpu in job.gpus_held:
            self._holders[gpu].remove(job)
        self.world.halt(job)
        for other in self._others(job):
            self._go(other)

    def _pace(self, job: Live) -> None:
        for member in (job, *self._others(job)):
            self._go(member)

    def _go(self, job: Live) -> None:
        """Let a holder make progress beside the others that have its GPUs now."""
        if job.lease is not None:
            job.lease.meet(tuple(other.key for other in self._others(job)), self.world.now_s)
        self.world.go(job, self._factor(job))

    def _factor(self, job: Live) -> float:
        """Return the share of its speed alone that a job keeps beside those it is packed with."""
        pairs = self.world.setup.interference
        factor = 1.0
        for other in self._others(job):
            mine, theirs = job.trace.model, other.trace.model
            if (mine, theirs) in pairs:
                factor *= pairs[mine, theirs][0]
            elif (theirs, mine) in pairs:
                factor *= pairs[theirs, mine][1]
            else:
                factor *= 0.5
        return factor

    def _others(self, job: Live) -> list[Live]:
        """Return the other holders of a job's GPUs, in order of keys."""
        found = {o.key: o for gpu in job.gpus_held for o in self._holders.get(gpu, ()) if o is not job}
        return [found[key] for key in sorted(found)]

    def _partners(self, job: Live) -> list[Live]:
        return [self.world.live[key] for key in sorted(job.packed) if key in self.world.live]

    def _resume_cost(self, job: Live) -> None:
        if job.lease is not None and job.lease.state == "yielded":
            job.waiting_cost_s += self.world.setup.costs.resume_s + self._copy_s(job)

    def _copy_s(self, job: Live) -> float:
        size_gb = job.truth.gpu_memory_low_gb if job.truth is not None else None
        return (size_gb or 0.0) / self.world.setup.costs.copy_gb_s

    def _least_vtime(self, job: Live) -> float:
        now_s = self.world.now_s
        mine = set(job.gpus_held)
        found = [
            o.lease.vtime_s + (now_s - o.lease.since_s if o.lease.state == "held" else 0.0)
            for share in job.placement
            for key in self._on_host.get(self.world.nodes[share.node].host, ())
            for o in [self.world.live.get(key)]
            if o is not None and o is not job and o.lease is not None and not mine.isdisjoint(o.gpus_held)
        ]
        return min(found, default=0.0)

    def _assign(self, job: Live, placement: Placement) -> None:
        """Take GPUs in Slurm's books: the lowest free ones of each lane."""
        gpus: list[Gpu] = []
        for share in placement:
            node = self.world.nodes[share.node]
            taken = self._given[share.node]
            free = [index for index in range(node.gpus) if index not in taken][: share.gpus]
            taken.update(free)
            gpus += [Gpu(node.host, index) for index in free]
            self._on_host.setdefault(node.host, set()).add(job.key)
        job.gpus_held = tuple(gpus)

    def _unassign(self, job: Live) -> None:
        by_host: dict[str, set[int]] = {}
        for gpu in job.gpus_held:
            by_host.setdefault(gpu.host, set()).add(gpu.index)
        for share in job.placement:
            host = self.world.nodes[share.node].host
            self._given[share.node] -= by_host.get(host, set())
            self._on_host[host].discard(job.key)
        job.gpus_held = ()

    # --- What others see ----------------------------------------------------------------------------

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes with Slurm's books filled in."""
        found = []
        for node in nodes:
            gpus, cpus, memory_mb = self.world.used(node.name)
            found.append(replace(node, gpus_used=gpus, cpus_used=cpus, memory_used_mb=memory_mb))
        return tuple(found)

    def use(self) -> tuple[int, float]:
        """Return the GPUs that somebody holds, and how many of them compute."""
        held = [jobs for jobs in self._holders.values() if jobs]
        busy = sum(min(1.0, sum(map(_utilization, jobs))) for jobs in held)
        return len(held), busy

    def check(self) -> None:
        """Raise SimulationError when a host has not got what its jobs were given.

        Two holders of a GPU that are not packed are an AssertionError: a bug of this simulator, not of a policy.
        """
        for gpu, jobs in self._holders.items():
            for job, times in Counter(job.key for job in jobs).items():
                others = {other.key for other in jobs if other.key != job}
                if times > 1 or not others <= self.world.live[job].packed:
                    raise AssertionError(f"{gpu} has holders {[str(other.key) for other in jobs]}")
        for host, (cpus, memory_mb) in self._taken().items():
            node = self.world.nodes[host]
            if cpus > node.cpus or memory_mb > node.memory_mb:
                raise SimulationError(
                    f"those who hold GPUs of {host} were given {cpus} of {node.cpus} CPUs, and all its jobs "
                    f"{memory_mb} of {node.memory_mb} MB"
                )

    def _taken(self) -> dict[str, tuple[int, int]]:
        """Return each host's CPUs of those who hold GPUs there, and the MB of all its jobs."""
        taken: dict[str, tuple[int, int]] = {}
        for job in self.world.live.values():
            holds = job.lease is not None and job.lease.state == "held"
            for share in job.placement:
                host = self.world.nodes[share.node].host
                cpus, memory_mb = taken.get(host, (0, 0))
                taken[host] = (cpus + (share.cpus if holds else 0), memory_mb + share.memory_mb)
        return taken


def _utilization(job: Live) -> float:
    value = job.truth.gpu_utilization if job.truth is not None else None
    return 1.0 if value is None else value
