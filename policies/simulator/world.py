"""The simulated cluster: its nodes, the jobs on them, and what happens between two rounds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.errors import InputError, SimulationError
from cadenza.policies.core.model import ClusterSnapshot, Host, Job, JobKey, Node, Placement
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.job import Live, best_or_one, whole_iterations
from cadenza.policies.simulator.leases import Leases
from cadenza.policies.simulator.run_values import JobResult, Sample, Setup


class World:
    """State of the simulation. ``now_s`` only moves forward, through :meth:`advance`."""

    def __init__(self, trace: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup) -> None:
        self.setup = setup
        self.now_s = 0.0
        self.nodes = {node.name: node for node in nodes}
        self.types = {node.name: node.gpu_type for node in nodes}
        self.live: dict[JobKey, Live] = {}
        self._records: dict[JobKey, Job] = {}
        """The live jobs as the last snapshot showed them, but for those in ``_stale``."""
        self._stale: list[Live] = []
        self._shown: ClusterSnapshot | None = None
        """The last snapshot, while nothing has changed but the time."""
        self.ended: list[JobResult] = []
        self.samples: list[Sample] = []
        self.leases = Leases(self) if setup.lanes > 1 else None
        self._arrivals = sorted(trace, key=lambda job: (job.submit_s, job.id))
        self._arrived = 0
        self._ends: list[tuple[float, int, int, JobKey]] = []
        self._outages = sorted(
            [(f.start_s, 0, f.node) for f in setup.failures] + [(f.end_s, 1, f.node) for f in setup.failures]
        )
        self._broken = 0
        first = max(nodes, key=lambda node: (node.gpus, node.cpus, node.name))
        self._fair = (first.cpus / first.gpus, first.memory_mb / first.gpus)
        self._widest = first.gpus
        self._check_fits(nodes)
        self._used = {node.name: [0, 0, 0] for node in nodes}
        self._touched: set[str] = set()
        self._tuple: tuple[Node, ...] | None = None
        self._hosts = tuple(Host(name, agent_alive=True) for name in sorted({node.host for node in nodes}))
        self.held = self.cpus_used = self.running = 0
        self.busy = 0.0

    def _check_fits(self, nodes: Sequence[Node]) -> None:
        gpus = sum(node.gpus for node in nodes if node.lane == 0)
        most_gb = max(node.memory_mb for node in nodes) / MB_PER_GB
        for job in self._arrivals:
            if job.gpus > gpus:
                raise InputError(f"job {job.id} asks for {job.gpus} GPUs, the cluster has {gpus}")
            on_node = min(job.gpus, self._widest)
            if (job.memory_gb_per_gpu or 0.0) * on_node > most_gb:
                each = f"{job.memory_gb_per_gpu:g} GB for each of {on_node} GPUs on a node"
                raise InputError(f"job {job.id} asks for {each}, the largest node has {most_gb:g}")

    # --- Time ---------------------------------------------------------------------------------------

    @property
    def next_event_s(self) -> float:
        """Return when the next job arrives or ends, or a node fails or comes back; infinite without any."""
        self._drop_stale()
        arrival = self._arrivals[self._arrived].submit_s if self._arrived < len(self._arrivals) else inf
        end = self._ends[0][0] if self._ends else inf
        outage = self._outages[self._broken][0] if self._broken < len(self._outages) else inf
        return min(arrival, end, outage)

    @property
    def over(self) -> bool:
        """Whether nothing is left to happen."""
        return not self.live and self._arrived == len(self._arrivals)

    def advance(self, time_s: float) -> bool:
        """Move to ``time_s`` through all events until then; return whether there were any."""
        happened = False
        while (event_s := self.next_event_s) <= time_s:
            happened = True
            self.now_s = event_s
            self._end_jobs()
            self._fail_nodes()
            self._arrive()
            self.sample()
        self.now_s = time_s
        return happened

    def _arrive(self) -> None:
        while self._arrived < len(self._arrivals) and self._arrivals[self._arrived].submit_s <= self.now_s:
            trace = self._arrivals[self._arrived]
            self._arrived += 1
            job = Live(trace, self._request(trace), self._stale)
            self.live[job.key] = job
            job.changed()

    def _request(self, trace: TraceJob) -> tuple[int, int, int]:
        """Return a job's CPUs, MB and number of nodes as its user would ask: in proportion to its GPUs, unless told."""
        cpus, memory_mb = self._fair
        if trace.memory_gb_per_gpu is not None:
            memory_mb = trace.memory_gb_per_gpu * MB_PER_GB
        return int(cpus * trace.gpus), int(memory_mb * trace.gpus), -(-trace.gpus // self._widest)

    def _drop_stale(self) -> None:
        while self._ends:
            _, _, version, key = self._ends[0]
            job = self.live.get(key)
            if job is not None and job.version == version:
                return
            heappop(self._ends)

    def _end_jobs(self) -> None:
        self._drop_stale()
        while self._ends and self._ends[0][0] <= self.now_s:
            job = self.live[heappop(self._ends)[3]]
            self.stop(job)
            self._forget(job)
            job.done_s = job.trace.work_s
            self.ended.append(job.result(self.now_s))
            self._drop_stale()

    def cancel(self, job: Live) -> None:
        """Take a job away for good, as when its user cancels it; it has no result."""
        self.stop(job)
        self._forget(job)

    def _forget(self, job: Live) -> None:
        del self.live[job.key]
        self._records.pop(job.key, None)
        self._shown = None

    def _fail_nodes(self) -> None:
        while self._broken < len(self._outages) and self._outages[self._broken][0] <= self.now_s:
            _, back, name = self._outages[self._broken]
            self._broken += 1
            host = self.nodes[name].host
            for node in [node for node in self.nodes.values() if node.host == host]:
                self.nodes[node.name] = replace(node, up=bool(back))
                self._tuple = self._shown = None
                if not back:
                    self._lose(node.name)

    def _lose(self, node: str) -> None:
        every_s = self.setup.checkpoint_s
        for job in [job for job in self.live.values() if any(share.node == node for share in job.placement)]:
            self.requeue(job)
            job.done_s -= job.done_s % every_s if every_s else 0.0

    # --- What a gateway shows -----------------------------------------------------------------------

    def snapshot(self) -> ClusterSnapshot:
        """Return the cluster as it is now; unchanged jobs and nodes are the same objects as before."""
        if self._shown is not None and not self._stale and self.leases is None:
            return self._shown.at(self.now_s)
        if self._tuple is None:
            self._tuple = tuple(self.nodes.values())
        # What a lease shows changes with time.
        for job in dict.fromkeys(self._stale) if self.leases is None else self.live.values():
            if job.key in self.live:
                self._records[job.key] = job.record(self.now_s)
        self._stale.clear()
        nodes = self._tuple if self.leases is None else self.leases.nodes(self._tuple)
        self._shown = ClusterSnapshot(self.now_s, nodes, tuple(self._records.values()), self._hosts)
        return self._shown

    # --- What a gateway does ------------------------------------------------------------------------

    def start(self, job: Live, placement: Placement) -> None:
        """Start a pending job on these nodes."""
        self._book(placement, 1)
        job.state, job.placement = "RUNNING", placement
        job.changed()
        costs = self.setup.costs
        first_s = costs.start_s if job.trace.startup_s is None else job.trace.startup_s
        job.launch(self.now_s + costs.dispatch_s, costs.restart_s if job.start_s is not None else first_s)
        if self.leases is None:
            self.go(job)
        else:
            self.leases.enter(job)

    def requeue(self, job: Live) -> None:
        """Take a job off its nodes, back into the queue, held; it becomes another incarnation."""
        self.stop(job)
        self._forget(job)
        job.key = JobKey(job.key.id, job.key.restart + 1)
        job.state = "PENDING"
        job.changed()
        self.live[job.key] = job

    def leave(self, job: Live) -> None:
        """End a job's processes before a move; where jobs share, others can have its GPUs at once."""
        if self.leases is not None:
            self.leases.vacate(job)
            job.state = "RUNNING"  # a job that Slurm had suspended starts anew
        elif job.running:
            self._halt(job)

    def move(self, job: Live, placement: Placement) -> None:
        """Give a job other shares."""
        if job.running and self.leases is None:
            self._halt(job)
        if self.leases is not None and not (job.gpus_held and _same_gpus(placement, job.placement)):
            self.leases.relocate(job, placement)
        if job.running:
            self.cpus_used += sum(share.cpus for share in placement) - sum(share.cpus for share in job.placement)
        self._book(job.placement, -1)
        self._book(placement, 1)
        job.placement = placement
        job.gpus = sum(share.gpus for share in placement)
        job.changed()
        if self.leases is None:
            self.go(job)
        else:
            self.leases.settle(job)

    def stop(self, job: Live) -> None:
        """Take a job off its nodes."""
        if self.leases is not None:
            self.leases.leave(job)
        if job.running:
            self._halt(job)
        self._book(job.placement, -1)
        job.placement = ()

    def go(self, job: Live, factor: float = 1.0) -> None:
        """Let a placed job make progress, its speed times ``factor``, after what it has to pay."""
        setup = self.setup
        if setup.synergy:
            speed = best_or_one(job.truth, job.placement, job.gpus, self._fair)
            rate = whole_iterations(speed, job.trace.iteration_s, setup.round_s)
        else:
            speed = placement_speed(job.truth, job.placement, self.types)
            rate = speed * factor * job.gpus / job.trace.gpus
        if not job.running:
            self._count(job, 1)
        job.settle_on(self.types[job.placement[0].node], self.now_s)
        job.run(self.now_s, speed, rate, job.waiting_cost_s)
        job.waiting_cost_s = 0.0
        job.finish_s = job.ends(setup.round_s if setup.synergy else None)
        heappush(self._ends, (job.finish_s, job.key.id, job.version, job.key))

    def halt(self, job: Live) -> None:
        """Let a job keep its place and make no progress."""
        self._halt(job)

    def _halt(self, job: Live) -> None:
        self._count(job, -1)
        job.pause(self.now_s)

    # --- Books --------------------------------------------------------------------------------------

    def _book(self, placement: Placement, sign: int) -> None:
        for name, gpus, cpus, memory_mb in placement:
            used = self._used[name]
            used[0] += sign * gpus
            used[1] += sign * cpus
            used[2] += sign * memory_mb
            self._touched.add(name)

    def _count(self, job: Live, sign: int) -> None:
        self.running += sign
        self.cpus_used += sign * sum(share.cpus for share in job.placement)
        if self.leases is None:
            self.held += sign * job.gpus
            utilization = job.truth.gpu_utilization if job.truth is not None else None
            self.busy += sign * job.gpus * (1.0 if utilization is None else utilization)

    def check(self) -> None:
        """Raise SimulationError when a round left a node with more than it has."""
        for name in self._touched:
            node, (gpus, cpus, memory_mb) = self.nodes[name], self._used[name]
            shared = self.leases is not None  # CPUs and memory of lanes are their host's: see Leases.check
            if gpus > node.gpus or (not shared and (cpus > node.cpus or memory_mb > node.memory_mb)):
                raise SimulationError(
                    f"{name} was given {gpus} of {node.gpus} GPUs, {cpus} of {node.cpus} CPUs, "
                    f"{memory_mb} of {node.memory_mb} MB"
                )
        self._touched.clear()
        if self.leases is not None:
            self.leases.check()

    def used(self, name: str) -> tuple[int, int, int]:
        """Return the GPUs, CPUs and MB in use on a node, by Slurm's books."""
        gpus, cpus, memory_mb = self._used[name]
        return gpus, cpus, memory_mb

    def sample(self) -> None:
        """Write down the use of the cluster from now on."""
        if self.samples and self.samples[-1].time_s == self.now_s:
            self.samples.pop()
        held, busy = (self.held, self.busy) if self.leases is None else self.leases.use()
        waiting = len(self.live) - self.running
        self.samples.append(Sample(self.now_s, held, self.cpus_used, self.running, waiting, busy))

    def results(self) -> tuple[JobResult, ...]:
        """Return every submitted job's result, the unfinished ones as of now."""
        for job in self.live.values():
            job.settle(self.now_s)
        jobs: Iterable[JobResult] = (*self.ended, *(job.result(None) for job in self.live.values()))
        return tuple(sorted(jobs, key=lambda job: (job.submit_s, job.id)))


def _same_gpus(one: Placement, other: Placement) -> bool:
    return [share[:2] for share in one] == [share[:2] for share in other]
