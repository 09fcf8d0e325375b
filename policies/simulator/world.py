"""The simulated cluster: its nodes, the jobs on them, and the events between two rounds."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from heapq import heappop, heappush
from math import inf

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.amounts import Amount
from cadenza.policies.core.errors import InputError, SimulationError
from cadenza.policies.core.idle_gpus import HostGpus, idle_waiting_gpus
from cadenza.policies.core.model import ClusterSnapshot, Host, Job, JobKey, Node, Placement, Share
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.cluster import widest_nodes
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.job import SimJob, best_or_one, even_share, whole_iterations
from cadenza.policies.simulator.leases import Changes, Leases
from cadenza.policies.simulator.priority import Person
from cadenza.policies.simulator.run_values import JobResult, Sample, Setup
from cadenza.policies.simulator.scheduler import QueuedJob, Scheduler
from cadenza.policies.simulator.waiting_count import WaitingCount, narrowest
from cadenza.policies.slurm.backfill import Shares

SAVE_SHARE = 0.25
"""Part of a move's measured cost that passes until its checkpoint is complete, where moves take several rounds.

The rest is the start-up at the new place. An assumption: ``costs.toml`` has the whole only."""
REQUEUE_S = 1.0
"""Time after which Slurm starts a requeued job again at the earliest, with ``requeue_delay=0``."""


def time_limit_s(job: TraceJob) -> float:
    """Return a job's time limit: as the trace says, else twice its run time + 300 s."""
    return 2 * job.work_s + 300 if job.time_limit_s is None else job.time_limit_s


class World:
    """State of the simulation. ``now_s`` only moves forward, through :meth:`advance`."""

    def __init__(
        self, trace: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup, reach: int | None = None
    ) -> None:
        """``reach``: number of waiting jobs, the first of the queue, that decisions depend on; None: all."""
        self.setup = setup
        self.now_s = 0.0
        self.nodes = {node.name: node for node in nodes}
        self.types = {node.name: node.gpu_type for node in nodes}
        self.live: dict[JobKey, SimJob] = {}
        self._records: dict[JobKey, Job] = {}
        """The live jobs as the last snapshot showed them, but for those in ``_stale``; ``_unready`` age."""
        self._stale, self._unready = list[SimJob](), list[SimJob]()
        self._waiting = WaitingCount()
        self._shown: ClusterSnapshot | None = None
        """The last snapshot, while nothing but the time has changed."""
        self.ended, self.samples = list[JobResult](), list[Sample]()
        self.leases: Leases | None = None
        if setup.lanes > 1 or setup.phased_moves:
            self.leases = Leases(self.nodes, setup.costs, setup.interference, check_hosts=not setup.phased_moves)
        self._used = {node.name: [0, 0, 0] for node in nodes}
        people = {Person(job.account, job.user) for job in (*trace, *setup.load)}
        # A method of its own would have the world in a cycle, so that it lived on after its end.
        self.queue = Scheduler(nodes, setup.queue, setup.backfill, people, partial(World._started, weakref.proxy(self)))
        self._load = sorted(setup.load, key=lambda job: (job.submit_s, job.id), reverse=True)
        """Jobs without GPUs that are to come, the next one last."""
        self._load_ends: list[tuple[float, int, QueuedJob]] = []
        self._load_cpus = self._starts = self._arrived = self._broken = 0
        self._arrivals = sorted(trace, key=lambda job: (job.submit_s, job.id))
        self._reach = reach if self._only_the_first_count() else None
        self._seen: set[int] = set()
        """Jobs that have been within reach: a policy may remember them."""
        self._ends: list[tuple[float, int, int, JobKey]] = []
        self._saves: list[float] = []
        """When checkpoints of jobs that stand for them are complete."""
        self.needs_prompt_round = self._unsampled = self.matters = False
        """True if a job in transit waits for the next round; if something has changed since the last sample; if
        something has happened since the last round that a decision may depend on."""
        self._prefetched: dict[str, set[JobKey]] = {}
        """Jobs on their way to a host that has read their files."""
        self._outages = sorted(
            [(f.start_s, 0, f.node) for f in setup.failures] + [(f.end_s, 1, f.node) for f in setup.failures]
        )
        first = max(nodes, key=lambda node: (node.gpus, node.cpus, node.name))
        self._fair = (first.cpus / first.gpus, first.memory_mb / first.gpus)
        self._widest = {"": widest_nodes(nodes)} | {
            name: widest_nodes(node for node in nodes if node.gpu_type == name)
            for name in {*self.types.values()} - {""}
        }
        """By type of GPU, then by partition; the type "" stands for all."""
        self._widest_without: dict[tuple[str, frozenset[str]], dict[str, Node]] = {}
        """The same without nodes that some jobs may not have."""
        self._check_fits(nodes)
        self._cpus = sum(node.cpus for node in nodes if node.lane == 0)
        self._booked = dict(self.nodes)
        """The nodes with Slurm's books filled in, except those in ``_rebooked``."""
        self._rebooked, self._touched = set[str](), set[str]()
        self._tuple: tuple[Node, ...] | None = None
        self._hosts = tuple(Host(name, agent_alive=True) for name in sorted({node.host for node in nodes}))
        self.held = self.cpus_used = self.running = 0
        self.busy = 0.0

    def _check_fits(self, nodes: Sequence[Node]) -> None:
        gpus, most_mb = Counter[tuple[str, str]](), defaultdict[str, int](int)
        for node in nodes:
            for partition in node.partitions:
                for gpu_type in {"", node.gpu_type}:
                    gpus[partition, gpu_type] += node.gpus if node.lane == 0 else 0
                most_mb[partition] = max(most_mb[partition], node.memory_mb)
        for job in self._arrivals:
            there = gpus[job.partition, job.gpu_type]
            if job.barred:
                away = (node for node in nodes if node.name in job.barred and job.partition in node.partitions)
                there -= sum(node.gpus for node in away if not node.lane and job.gpu_type in ("", node.gpu_type))
            if job.gpus > there:
                kind = f" of type {job.gpu_type}" if job.gpu_type else ""
                kind += " on nodes that meet its constraint" if job.barred else ""
                raise InputError(f"job {job.id} asks for {job.gpus} GPUs{kind}, the cluster has {there}")
            on_node = min(job.gpus, self._like(job).gpus)
            most_gb = most_mb[job.partition] / MB_PER_GB
            if (job.memory_gb_per_gpu or 0.0) * on_node > most_gb:
                each = f"{job.memory_gb_per_gpu:g} GB for each of {on_node} GPUs on a node"
                raise InputError(f"job {job.id} asks for {each}, the largest node has {most_gb:g}")

    # --- Time ---------------------------------------------------------------------------------------

    @property
    def next_event_s(self) -> float:
        """Return the time of the next arrival, end, save, failure, recovery or look of Slurm; infinite without any."""
        return min(self._arrival_s, self._other_event_s, self.queue.next_event_s)

    @property
    def _arrival_s(self) -> float:
        return self._arrivals[self._arrived].submit_s if self._arrived < len(self._arrivals) else inf

    @property
    def _other_event_s(self) -> float:
        self._drop_stale()
        end = self._ends[0][0] if self._ends else inf
        outage = self._outages[self._broken][0] if self._broken < len(self._outages) else inf
        load = self._load[-1].submit_s if self._load else inf
        load_end = self._load_ends[0][0] if self._load_ends else inf
        return min(end, outage, self.next_save_s, load, load_end)

    @property
    def next_save_s(self) -> float:
        """Return the time at which the next checkpoint is complete; infinite without any."""
        return self._saves[0] if self._saves else inf

    @property
    def over(self) -> bool:
        """Return True if no job is left, neither here nor to come."""
        return not self.live and self._arrived == len(self._arrivals)

    def advance(self, time_s: float) -> bool:
        """Move to ``time_s`` through all events until then; return True if there were any.

        A look of Slurm at its queue that starts nothing and leaves the order as it was is none.
        """
        happened = False
        while True:
            other_s, arrival_s = self._other_event_s, self._arrival_s
            event_s = min(other_s, arrival_s, self.queue.next_event_s)
            if event_s > time_s:
                break
            matters = other_s <= event_s
            changed = matters or arrival_s <= event_s
            self._move_to(event_s)
            came, started = self._arrived, self._starts
            matters |= self.queue.tick(event_s)
            while self._saves and self._saves[0] <= event_s:
                heappop(self._saves)
            self._end_jobs()
            self._fail_nodes()
            self._end_load()
            self._arrive()
            self.start_queued()
            matters |= self._starts > started
            if changed or matters:
                happened = self._unsampled = True
            self.matters |= matters or any(map(self._within_reach, self._arrivals[came : self._arrived]))
        self._move_to(time_s)
        return happened

    def _only_the_first_count(self) -> bool:
        """Return True if no word of Slurm on a job behind others counts: on hosts with lanes and at limits it does."""
        return self._free and len(self.queue.lanes) == 1 and not (self._load or self.setup.place)

    @cached_property
    def _free(self) -> bool:
        """Return True if no job waits for anything but resources."""
        free = all(job.array_limit is None and not job.licenses for job in self._arrivals)
        return free and not self.queue.limited

    def _within_reach(self, trace: TraceJob) -> bool:
        """Return True if decisions can depend on a job that has come and waits."""
        queued = self.live[JobKey(trace.id, 0)].queued
        return self._reach is None or self.queue.before(queued) < self._reach

    def _arrive(self) -> None:
        while self._arrived < len(self._arrivals) and self._arrivals[self._arrived].submit_s <= self.now_s:
            trace = self._arrivals[self._arrived]
            self._arrived += 1
            job = SimJob(trace, self._request(trace), self._stale)
            job.queued = self._queued(trace, self._each(job), job.num_nodes, job.cpus, job)
            self.live[job.key] = job
            job.changed()
            self._wait(job)
        while self._load and self._load[-1].submit_s <= self.now_s:
            trace = self._load.pop()
            widest = self._like(trace)
            count = trace.fewest_nodes(widest)
            each = (0, -(-trace.cpus_on(widest) // count), -(-trace.memory_mb // count))
            self.queue.submit(self._queued(trace, (each,) * count, count, count * each[1], trace), self.now_s)

    def _wait(self, job: SimJob, delay_s: float = 0.0) -> None:
        """Let a pending job wait: in Slurm's queue, or for a policy that places it."""
        if self.setup.place and job.trace.managed:
            job.state_reason = "Resources"
        else:
            job.state_reason = ""
            self.queue.submit(job.queued, self.now_s, delay_s=delay_s)
            job.state_reason = job.queued.reason

    def _queued(
        self, trace: TraceJob, each: tuple[Amount, ...], nodes: int, cpus: int, owner: SimJob | TraceJob
    ) -> QueuedJob:
        """Return a job as the simulated slurmctld has it."""
        among = self.queue.nodes_of[trace.partition]
        if trace.gpu_type:
            among &= self.queue.of_type(trace.gpu_type)
        if trace.barred:
            among &= ~self.queue.named(trace.barred)
        if not trace.managed or not trace.gpus:  # further lanes are for those that opted in
            among &= self.queue.lanes[0]
        person = Person(trace.account, trace.user)
        facts = self.queue.priorities.facts(person, trace.qos, trace.partition, trace.nice, nodes, cpus)
        return QueuedJob(
            trace.id, trace.submit_s, trace.partition, facts,
            gpus=trace.gpus, each=each, among=among, limit_s=time_limit_s(trace), array=trace.array,
            array_limit=trace.array_limit, licenses=trace.licenses, owner=owner,
        )  # fmt: skip

    @staticmethod
    def _each(job: SimJob) -> tuple[Amount, ...]:
        """Return a job's request on each of its nodes, the largest part first."""
        shares = (even_share(job, at, "") for at in range(max(job.num_nodes, 1)))
        return tuple(sorted((share[1:] for share in shares), reverse=True))

    def _located(self, share: Share) -> tuple[int, Amount]:
        return self.queue.at[share.node], (share.gpus, share.cpus, share.memory_mb)

    def request(self, job: SimJob) -> None:
        """Tell Slurm what a pending job asks for now, and the nodes that it has to have."""
        nodes = sorted(job.required_nodes)
        pins = tuple(share for share in job.promised if share.gpus)
        if not pins or sorted(share.node for share in pins) != nodes:
            pins = tuple(even_share(job, at, name) for at, name in enumerate(nodes))
        self.queue.ask(job.queued, job.gpus, self._each(job), tuple(self._located(share) for share in pins))
        job.stale.append(job)

    def set_factor(self, job: SimJob, factor: int) -> None:
        """Set a job's SiteFactor; the queue is in the new order at once."""
        self.queue.set_factor(job.queued, factor, self.now_s)
        job.stale.append(job)

    def _like(self, trace: TraceJob) -> Node:
        """Return the widest node that a job may have: its parts for each GPU are what the job gets unasked."""
        if not trace.barred:
            return self._widest[trace.gpu_type][trace.partition]
        key = trace.gpu_type, trace.barred
        if key not in self._widest_without:
            among = (node for node in self.nodes.values() if node.name not in trace.barred)
            kept = [node for node in among if trace.gpu_type in ("", node.gpu_type)]
            self._widest_without[key] = widest_nodes(kept)
        return self._widest_without[key][trace.partition]

    def _request(self, trace: TraceJob) -> tuple[int, int, int]:
        """Return the CPUs, MB and nodes that a job's user asks for: in proportion to its GPUs unless the trace says."""
        widest = self._like(trace)
        memory_mb = widest.memory_mb / widest.gpus
        if trace.memory_gb_per_gpu is not None:
            memory_mb = trace.memory_gb_per_gpu * MB_PER_GB
        return trace.cpus_on(widest), int(memory_mb * trace.gpus), trace.fewest_nodes(widest)

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

    def cancel(self, job: SimJob) -> None:
        """Remove a job for good, as when its user cancels it; it has no result."""
        self.stop(job)
        self._forget(job)

    def _forget(self, job: SimJob) -> None:
        self.queue.withdraw(job.queued)
        for keys in self._prefetched.values():
            keys.discard(job.key)
        del self.live[job.key]
        self._stale.append(job)
        self._records.pop(job.key, None)
        self._shown = None

    def _fail_nodes(self) -> None:
        while self._broken < len(self._outages) and self._outages[self._broken][0] <= self.now_s:
            _, back, name = self._outages[self._broken]
            self._broken += 1
            host = self.nodes[name].host
            for node in [node for node in self.nodes.values() if node.host == host]:
                self._replace(replace(node, up=bool(back)))
                if back:
                    continue
                for job in [job for job in self.live.values() if any(s.node == node.name for s in job.placement)]:
                    # Slurm itself requeues the jobs of a node that it has lost (slurm.conf(5), JobRequeue).
                    self.requeue(job, hold=False)

    def _replace(self, node: Node) -> None:
        if node.takes_jobs != self.nodes[node.name].takes_jobs:
            self.queue.set_open(node.name, opened=node.takes_jobs)
        self.nodes[node.name] = node
        self._rebooked.add(node.name)
        self._tuple = self._shown = None

    # --- Jobs without GPUs --------------------------------------------------------------------------

    def _end_load(self) -> None:
        while self._load_ends and self._load_ends[0][0] <= self.now_s:
            queued = heappop(self._load_ends)[2]
            self._lessen(self.queue.running[queued][1], -1)
            self.queue.free_hosts(queued)

    def _lessen(self, shares: Shares, sign: int) -> None:
        """Show nodes without the CPUs and memory of a job without GPUs: no policy may give these out."""
        for at, (_, cpus, memory_mb) in shares:
            node = self.nodes[self.queue.nodes[at].name]
            self._replace(replace(node, cpus=node.cpus - sign * cpus, memory_mb=node.memory_mb - sign * memory_mb))
            self._load_cpus += sign * cpus if node.lane == 0 else 0

    # --- What a gateway shows -----------------------------------------------------------------------

    def snapshot(self) -> ClusterSnapshot:
        """Return the cluster as it is now; unchanged jobs and nodes are the same objects as before."""
        for queued in self.queue.tell():
            if isinstance(job := queued.owner, SimJob):
                job.state_reason = queued.reason
                job.stale.append(job)
        timeless = self.leases is None or (not self.setup.lease_times and not self._unready)
        if self._shown is not None and not self._stale and timeless:
            return self._shown.at(self.now_s)
        if self._tuple is None:
            self._tuple = tuple(self.nodes.values())
        # A lease's record changes with time, or at least until its job is ready.
        timed = self.leases.jobs if self.leases is not None and self.setup.lease_times else self._unready
        renewed = dict.fromkeys((*self._stale, *self._come_within_reach(), *timed))
        for job in renewed:
            if job.key in self.live and (self._reach is None or job.state != "PENDING" or job.key.id in self._seen):
                self._records[job.key] = job.record(self.now_s)
        self._unready = [job for job in renewed if job.lease is not None and not job.lease_stands(self.now_s)]
        self._waiting.update(self._stale, self.live, clear=True)
        nodes, hosts = self._tuple, self._hosts
        if self.leases is not None:
            for name in self._rebooked:
                gpus, cpus, memory_mb = self._used[name]
                self._booked[name] = replace(self.nodes[name], gpus_used=gpus, cpus_used=cpus, memory_used_mb=memory_mb)
            self._rebooked.clear()
            nodes = tuple(self._booked.values())
        if self._prefetched:
            hosts = tuple(
                replace(host, prefetched=tuple(sorted(self._prefetched.get(host.name, ())))) for host in hosts
            )
        self._shown = ClusterSnapshot(self.now_s, nodes, tuple(self._records.values()), hosts, self.queue.site())
        return self._shown

    def _come_within_reach(self) -> list[SimJob]:
        """Return the jobs that no snapshot has shown, and from now on all do."""
        if self._reach is None:
            return []
        first = (queued.owner for queued in self.queue.first(self._reach) if queued.id not in self._seen)
        found = [job for job in first if isinstance(job, SimJob)]
        self._seen.update(job.key.id for job in found)
        return found

    # --- What a gateway does ------------------------------------------------------------------------

    def start(self, job: SimJob, placement: Placement) -> None:
        """Start a pending job on these nodes."""
        self.queue.withdraw(job.queued)
        self._book(job, placement)
        job.state, job.placement, job.held, job.state_reason = "RUNNING", placement, False, ""
        job.gpus, job.promised = sum(share.gpus for share in placement), ()
        job.slurm_start_s = self.now_s if self.setup.phased_moves else None
        job.changed()
        costs = self.setup.costs
        first_s = costs.start_s if job.trace.startup_s is None else job.trace.startup_s
        cost_s = first_s if job.start_s is None else costs.restart_s
        job.launch(self.now_s + costs.dispatch_s, cost_s if job.move_cost_s is None else job.move_cost_s)
        job.move_cost_s, job.moves = None, False
        if self.leases is None:
            self.run(job)
        else:
            self.follow(self.leases.enter(job, self.now_s))

    def _started(self, queued: QueuedJob, shares: Shares) -> None:
        """Run a job that Slurm has started."""
        self._starts += 1
        if isinstance(job := queued.owner, SimJob):
            placement = (Share(self.queue.nodes[at].name, *amount) for at, amount in shares)
            self.start(job, tuple(sorted(placement)))
        elif isinstance(job, TraceJob):
            self._lessen(self.queue.take_hosts(queued, shares, self.now_s), 1)
            heappush(self._load_ends, (self.now_s + job.work_s, job.id, queued))

    def start_queued(self) -> None:
        """Let Slurm start the jobs of its queue that it starts now."""
        self.queue.settle(self.now_s)

    def release(self, job: SimJob) -> None:
        """Let Slurm start a pending job, now or once what it asks for is free."""
        job.held = False
        self.request(job)
        if not self.queue.waits(job.queued):
            self.queue.submit(job.queued, self.now_s)
        job.state_reason = job.queued.reason

    def requeue(self, job: SimJob, *, hold: bool = True) -> None:
        """Take a job off its nodes, back into the queue; it becomes another incarnation.

        Without a complete checkpoint that was ordered before, it loses the work since its last one.
        """
        saved = job.saved_s <= self.now_s
        self.stop(job)
        self._forget(job)
        job.key = JobKey(job.key.id, job.key.restart + 1)
        job.state, job.saved_s = "PENDING", inf
        # Requeues that lost no work would flatter every policy that preempts.
        if not saved:
            job.moves, job.move_cost_s = False, None
            job.lose_unsaved(self.setup.checkpoint_s)
        job.restarts += not job.moves
        job.requeued_s = self.now_s
        self._seen.add(job.key.id)
        self.needs_prompt_round |= saved
        job.changed()
        self.live[job.key] = job
        job.held = hold
        self.request(job)
        if hold:
            job.state_reason = ""
        else:
            self._wait(job, REQUEUE_S)

    def save(self, job: SimJob) -> None:
        """Have a job save a checkpoint, which takes a part of the move's cost.

        A job that holds its GPUs stops on them at a boundary; the state of one that has yielded is saved from host
        memory, and it pays the whole cost with its GPUs at the new place.
        """
        if self.leases is None or job.lease is None or job.lease.state not in ("held", "yielded"):
            return
        cost_s = self.setup.costs.restart_s if job.move_cost_s is None else job.move_cost_s
        save_s = SAVE_SHARE * cost_s
        if job.lease.state == "held":
            self.follow(self.leases.stop(job, self.now_s))
            job.move_cost_s = cost_s - save_s
        else:
            job.move_cost_s = cost_s
        job.saved_s, job.saved_work_s = self.now_s + save_s, job.done_s
        heappush(self._saves, job.saved_s)

    def prefetch(self, job: SimJob, hosts: Iterable[str]) -> None:
        """Have hosts read the files of a job that comes to them; the simulator knows no time that this takes."""
        for host in hosts:
            self._prefetched.setdefault(host, set()).add(job.key)
        self._shown = None
        self.needs_prompt_round = True

    def drain(self, name: str, *, drained: bool, reason: str) -> None:
        """Take a node out of service for new jobs, or put it back."""
        node = self.nodes[name]
        if node.drained != drained:
            self._replace(replace(node, drained=drained, drain_reason=reason if drained else ""))

    def leave(self, job: SimJob) -> None:
        """End a job's processes before a move; where jobs share, others can have its GPUs at once."""
        if self.leases is not None:
            self.follow(self.leases.vacate(job, self.now_s))
            job.state = "RUNNING"  # a job that Slurm had suspended starts anew
        elif job.running:
            self._halt(job)
        job.saved_work_s = job.done_s

    def move(self, job: SimJob, placement: Placement) -> None:
        """Give a job other shares."""
        if job.running and self.leases is None:
            self._halt(job)
        same_gpus = [share[:2] for share in placement] == [share[:2] for share in job.placement]
        if self.leases is not None and not (job.gpus_held and same_gpus):
            self.follow(self.leases.relocate(job, placement, self.now_s))
        if job.running:
            self.cpus_used += sum(share.cpus for share in placement) - sum(share.cpus for share in job.placement)
        if not self.setup.phased_moves:
            self._book(job, placement)
        job.placement = placement
        job.gpus = sum(share.gpus for share in placement)
        job.changed()
        if self.leases is None:
            self.run(job)
        else:
            self.follow(self.leases.settle(job, self.now_s))

    def stop(self, job: SimJob) -> None:
        """Take a job off its nodes."""
        if self.leases is not None:
            self.follow(self.leases.leave(job, self.now_s))
        if job.running:
            self._halt(job)
        self._book(job, ())
        job.placement = ()

    def follow(self, changes: Changes) -> None:
        """Stop and run jobs as their leases have changed."""
        for job in changes.stops:
            if job.running:
                self._halt(job)
        for job, factor in changes.runs:
            self.run(job, factor)

    def run(self, job: SimJob, factor: float = 1.0) -> None:
        """Let a placed job make progress, its speed times ``factor``, after the costs that it has to pay."""
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

    def _halt(self, job: SimJob) -> None:
        self._count(job, -1)
        job.pause(self.now_s)

    # --- Slurm's books and the figures -----------------------------------------------------------------

    def _book(self, job: SimJob, placement: Placement) -> None:
        """Allocate other shares to a job in Slurm's books."""
        for sign, shares in ((-1, job.allocated), (1, placement)):
            for name, gpus, cpus, memory_mb in shares:
                used = self._used[name]
                used[0] += sign * gpus
                used[1] += sign * cpus
                used[2] += sign * memory_mb
                self._touched.add(name)
                self._rebooked.add(name)
        self.queue.book(job.queued, tuple(self._located(share) for share in placement), self.now_s)
        job.allocated = placement
        if self.setup.booked is not None:
            self.setup.booked(self.now_s, job.trace.id, sum(share.gpus for share in placement))

    def _count(self, job: SimJob, sign: int) -> None:
        self.running += sign
        self.cpus_used += sign * sum(share.cpus for share in job.placement)
        if self.leases is None:
            self.held += sign * job.gpus
            self.busy += sign * job.gpus * job.gpu_utilization

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

    def note_change(self) -> None:
        """Have the use of the cluster recorded from now on, as it is once all of this moment has happened."""
        self._unsampled = True

    def _move_to(self, time_s: float) -> None:
        """Move the clock; what the cluster is like by then counts from the time at which it last changed."""
        if self._unsampled and time_s > self.now_s:
            self._sample()
        self.now_s = time_s

    def _sample(self) -> None:
        """Record the use of the cluster from now on."""
        self._unsampled = False
        held, busy = (self.held, self.busy) if self.leases is None else self.leases.use()
        waiting = len(self.live) - self.running
        cpus = min(self.cpus_used + self._load_cpus, self._cpus)
        self.samples.append(
            Sample(self.now_s, held, cpus, self.running, waiting, busy, self._idle_waiting() if waiting else 0.0)
        )

    def _idle_waiting(self) -> float:
        """Return the GPUs that no job holds where a waiting job fits."""
        # 1. GPUs that no job holds, by host.
        held = self.leases.held_by_host() if self.leases is not None else None
        idle_on: list[tuple[Node, int]] = []
        idle = 0
        for node in self.nodes.values():
            if node.lane == 0:
                used = self._used[node.name][0] if held is None else held[node.host]
                idle_on.append((node, node.gpus - used if node.up else 0))
                idle += idle_on[-1][1]
        if not idle:
            return 0.0
        # 2. The narrowest jobs that wait, by what rules hosts out for them.
        self._waiting.update(self._stale, self.live)
        asked = self._waiting.asked()
        if not self._free:
            # A job at a limit of its account, QOS, array or license would not start on free GPUs.
            jobs = (job for job in self.live.values() if job.state != "PENDING" or not self.queue.limit(job.queued))
            asked = [job.counted for job in jobs if job.counted is not None]
        found = narrowest(asked, idle)
        if not found:
            return 0.0
        # 3. Hosts on which one of them fits; full ones only tell how many hosts a wide job needs.
        least = min(node.gpus for node, _ in idle_on) if max(found.values()) > 1 else 1
        if max(found.values()) <= least:
            idle_on = [(node, free) for node, free in idle_on if free]
        hosts = [HostGpus(node.gpus, free, node.partitions, node.gpu_type, node.name) for node, free in idle_on]
        return float(idle_waiting_gpus(hosts, found))

    def results(self) -> tuple[JobResult, ...]:
        """Return every submitted job's result, the unfinished ones as of now."""
        if self._unsampled:
            self._sample()
        for job in self.live.values():
            job.settle(self.now_s)
        jobs: Iterable[JobResult] = (*self.ended, *(job.result(None) for job in self.live.values()))
        return tuple(sorted(jobs, key=lambda job: (job.submit_s, job.id)))
