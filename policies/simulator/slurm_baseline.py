"""Slurm without Cadenza on a trace: the main scheduler and backfill, no preemption; what completion times compare with.

Sources: slurm.conf, ``SchedulerParameters``; Slurm 25.11, ``_attempt_backfill`` in sched/backfill and
``_future_run_test`` in select/cons_tres. ``benchmarks/calibration.py`` compares with a real slurmctld.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.model import JobKey, Node, Share
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.cluster import widest_nodes
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.job import FIRST_ITERATIONS
from cadenza.policies.simulator.run_values import Counts, JobResult, Result, Sample, Setup

Amount: TypeAlias = tuple[int, int, int]
"""GPUs, CPUs and MB."""
NOTHING: Amount = (0, 0, 0)
Shares: TypeAlias = tuple[tuple[int, Amount], ...]
"""Positions of nodes, and what a job has there."""


@dataclass(frozen=True, slots=True)
class Backfill:
    """Scheduling parameters of a Slurm; the defaults are its own. Times in seconds."""

    interval_s: float = 30.0
    """``bf_interval``: time between two passes."""
    window_s: float = 86_400.0
    """``bf_window``: a job that could only start later than this gets no reservation."""
    max_jobs: int = 500
    """``bf_max_job_test``: jobs in order of priority that a pass looks at."""
    precision_s: float = 0.0
    """``bf_window_linear``: growth of the time over which running jobs count as ending at once; 0: it doubles."""
    batch_delay_s: float = 3.0
    """``batch_sched_delay``: least time between two looks at the queue for submissions."""
    full_interval_s: float = 60.0
    """``sched_interval``: time between two looks at the queue without an event."""
    size_s: float = 0.0
    """Age in queue that asking for all GPUs is worth: the ratio of PriorityWeightJobSize to Age, times MaxAge."""


SLURM = Backfill()
FIRST_WINDOW_S = 30.0
"""Jobs that end, by their limits, within so long are taken as ending at once (cons_tres, ``time_window``)."""
LAST_WINDOW_S = 365 * 86_400.0


class Pending(NamedTuple):
    """A job in the queue: its priority comes first; ``each`` is what it asks for on each of its nodes."""

    order: tuple[float, float, int]
    job: TraceJob
    each: tuple[Amount, ...]
    limit_s: float


class Slot(NamedTuple):
    """A stretch of time in a pass of backfill, and the nodes that no reservation has in it, as bits."""

    begin_s: float
    end_s: float
    nodes: int


def time_limit_s(job: TraceJob) -> float:
    """Return a job's time limit: as the trace says, else twice its run time + 300 s."""
    return 2 * job.work_s + 300 if job.time_limit_s is None else job.time_limit_s


def simulate_slurm(
    jobs: Sequence[TraceJob],
    nodes: Sequence[Node],
    setup: Setup,
    rules: Backfill = SLURM,
    *,
    progress: Callable[[float, int], None] | None = None,
) -> Result:
    """Return the result of Slurm alone: jobs start in order of priority, and later ones where they delay none.

    A job of up to a node's GPUs lies within one node; a wider one has an even part on each of the fewest nodes. All
    jobs are taken from their submission to their end, or to the setup's horizon. Time limits end no job. ``progress``
    is called after each event with the simulated time in seconds and the jobs that have ended.
    """
    return _Slurm(jobs, [node for node in nodes if node.lane == 0], setup, rules).run(progress)


class _Future:
    """Resources that become free as running jobs end by their limits; answers are kept for the next call."""

    def __init__(
        self, now_s: float, free: Sequence[Sequence[int]], running: Iterable[tuple[float, Shares, float]]
    ) -> None:
        self.now_s = now_s
        self.free = free
        ends = sorted((max(end_s, now_s + 1), shares) for end_s, shares, _ in running)
        self.ends_s = [end_s for end_s, _ in ends]
        self.shares = [shares for _, shares in ends]
        self.nodes = [_bits([at for at, _ in shares]) for shares in self.shares]
        """By job in the order of their ends: its nodes, as bits."""
        self._steps: dict[Amount, tuple[list[int], list[int]]] = {}
        self._on: dict[int, tuple[list[int], list[float]]] = {}

    def fitting(self, need: Amount, ended: int) -> int:
        """Return the nodes, as bits, with room for ``need`` once so many of the jobs have ended."""
        if need not in self._steps:
            self._steps[need] = self._steps_of(need)
        counts, nodes = self._steps[need]
        return nodes[bisect_right(counts, ended)]

    def _steps_of(self, need: Amount) -> tuple[list[int], list[int]]:
        """Return the numbers of ended jobs at which nodes come to have room, and all nodes with room before each."""
        free = [list(room) for room in self.free]
        counts, nodes = [], [sum(1 << at for at, room in enumerate(free) if _fits(need, room))]
        for ended, shares in enumerate(self.shares, 1):
            more = 0
            for at, amount in shares:
                for kind, value in enumerate(amount):
                    free[at][kind] += value
                if not nodes[-1] >> at & 1 and _fits(need, free[at]):
                    more |= 1 << at
            if more:
                counts.append(ended)
                nodes.append(nodes[-1] | more)
        return counts, nodes

    def on(self, nodes: int) -> tuple[list[int], list[float]]:
        """Return the positions of the jobs on any of these nodes, and their ends."""
        if nodes not in self._on:
            positions = [at for at, own in enumerate(self.nodes) if own & nodes]
            self._on[nodes] = positions, [self.ends_s[at] for at in positions]
        return self._on[nodes]


class _Slurm:
    def __init__(self, jobs: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup, rules: Backfill) -> None:
        self.nodes, self.setup, self.rules = nodes, setup, rules
        self.types = {node.name: node.gpu_type for node in nodes}
        self.free = [[node.gpus, node.cpus, node.memory_mb] for node in nodes]
        self.all_nodes = (1 << len(nodes)) - 1
        self.gpus = sum(node.gpus for node in nodes)
        self.widest = widest_nodes(nodes)
        self.nodes_of = {
            name: sum(1 << at for at, node in enumerate(nodes) if name in node.partitions) for name in self.widest
        }
        """By partition: its nodes, as bits."""
        self.arrivals = sorted((*jobs, *setup.load), key=lambda job: (job.submit_s, job.id))
        self.left = len(jobs)
        """Jobs with GPUs that have not ended."""
        self.arrived = 0
        """Jobs with GPUs that have been submitted."""
        self.queue: list[Pending] = []
        self.ends: list[tuple[float, int, TraceJob]] = []
        self.running: dict[int, tuple[float, Shares, float]] = {}
        """By job: the end by its time limit, what it has on which nodes, and its start."""
        self.future: _Future | None = None
        self.done: dict[int, JobResult] = {}
        self.samples: list[Sample] = []
        self.now_s = 0.0

    def run(self, progress: Callable[[float, int], None] | None) -> Result:
        """Run all events; backfill follows a change at the next multiple of its interval."""
        arrived, head_s, pass_s, horizon_s = 0, inf, inf, self.setup.horizon_s or inf
        looked_s, rules = -inf, self.rules
        while self.left:
            # 1. The next event.
            arrival_s = self.arrivals[arrived].submit_s if arrived < len(self.arrivals) else inf
            next_s = min(arrival_s, self.ends[0][0] if self.ends else inf, head_s, pass_s)
            if next_s >= horizon_s or next_s == inf:
                break
            self.now_s = next_s
            # 2. Ends and arrivals.
            ended = self._end_jobs()
            before = arrived
            while arrived < len(self.arrivals) and self.arrivals[arrived].submit_s <= self.now_s:
                insort(self.queue, self._pending(self.arrivals[arrived]))
                self.arrived += self.arrivals[arrived].gpus > 0
                arrived += 1
            if arrived > before:
                head_s = min(
                    head_s,
                    max(self.now_s, min(looked_s + rules.batch_delay_s, _next(self.now_s, rules.full_interval_s))),
                )
            # 3. The main scheduler starts jobs from the head of the queue: after each end, and soon after a submission.
            if head_s <= self.now_s:
                looked_s, head_s = self.now_s, inf
                self._start_head()
            elif ended:
                self._start_head()
            # 4. Backfill.
            if pass_s <= self.now_s:
                self._backfill()
                pass_s = inf
            elif ended or arrived > before:
                pass_s = min(pass_s, _next(self.now_s, rules.interval_s)) if self.queue else inf
            self._sample()
            if progress is not None:
                progress(self.now_s, len(self.done))
        return self._result(min(self.now_s if horizon_s == inf else horizon_s, horizon_s))

    # --- The queue --------------------------------------------------------------------------------------

    def _pending(self, job: TraceJob) -> Pending:
        widest = self.widest[job.partition]
        count = job.fewest_nodes(widest)
        cpus, memory_mb = widest.cpus / widest.gpus, widest.memory_mb / widest.gpus
        if job.cpus is not None and job.gpus:
            cpus = job.cpus_on(widest) / job.gpus
        if job.memory_gb_per_gpu is not None:
            memory_mb = job.memory_gb_per_gpu * MB_PER_GB
        widths = [job.gpus * (at + 1) // count - job.gpus * at // count for at in range(count)]
        each = tuple((gpus, int(cpus * gpus), int(memory_mb * gpus)) for gpus in sorted(widths, reverse=True))
        if not job.gpus:
            each = ((0, -(-job.cpus_on(widest) // count), -(-job.memory_mb // count)),) * count
        order = (job.submit_s - self.rules.size_s * job.gpus / self.gpus, job.submit_s, job.id)
        return Pending(order, job, each, time_limit_s(job))

    def _end_jobs(self) -> bool:
        ended = False
        while self.ends and self.ends[0][0] <= self.now_s:
            finish_s, _, job = heappop(self.ends)
            _, shares, start_s = self.running.pop(job.id)
            self.future = None
            for at, amount in shares:
                for kind, value in enumerate(amount):
                    self.free[at][kind] += value
            if job.gpus:
                self.done[job.id] = self._job_result(job, start_s, finish_s, shares)
                self.left -= 1
            ended = True
        return ended

    def _start_head(self) -> None:
        """Start jobs in order; a job that waits keeps those of its partition waiting, and no others."""
        blocked: set[str] = set()
        at = 0
        while at < len(self.queue) and len(blocked) < len(self.nodes_of):
            pending = self.queue[at]
            if pending.job.partition not in blocked and (spot := self._place(pending, self.free, self.all_nodes)):
                self._start(self.queue.pop(at), spot)
            else:
                blocked.add(pending.job.partition)
                at += 1

    def _start(self, pending: Pending, spot: Sequence[int]) -> None:
        """Start a job with its parts on these nodes."""
        job = pending.job
        shares = tuple(zip(spot, pending.each, strict=True))
        for at, amount in shares:
            for kind, value in enumerate(amount):
                self.free[at][kind] -= value
        self.running[job.id] = (self.now_s + pending.limit_s, shares, self.now_s)
        self.future = None
        heappush(self.ends, (self.now_s + self._start_up_s(job) + job.work_s / self._speed(job, shares), job.id, job))

    def _place(self, pending: Pending, free: Sequence[Sequence[int]], among: int) -> list[int]:
        """Return the nodes of ``among`` that a job gets, or nothing: one node is the first of its partition with room.

        Several are taken from the smallest run of adjacent nodes with room that has as many, or else from the largest.
        """
        need, fitting = pending.each[0], 0
        among &= self.nodes_of[pending.job.partition]
        for at, room in enumerate(free):
            if among >> at & 1 and _fits(need, room):
                fitting |= 1 << at
                if len(pending.each) == 1:
                    break
        return _choose(fitting, len(pending.each))

    # --- Backfill ---------------------------------------------------------------------------------------

    def _backfill(self) -> None:
        """Look at the jobs in order of priority: each starts now, or gets a reservation for its earliest start.

        A reservation keeps all other jobs off its nodes. Jobs behind the last one that fits now are left out: they
        cannot start, and nothing else comes of a reservation.
        """
        slots = [Slot(self.now_s, self.now_s + self.rules.window_s, self.all_nodes)]
        tested = self.queue[: self.rules.max_jobs]
        fitting = self._last_fitting(tested)
        for number, pending in enumerate(tested):
            if number > fitting:
                break
            start_s, spot = self._earliest(pending, slots)
            if spot and start_s <= self.now_s:
                self._start(pending, spot)
                self.queue.remove(pending)
                fitting = self._last_fitting(tested[: fitting + 1])
            elif spot:
                _reserve(slots, start_s, start_s + pending.limit_s, _bits(spot))

    def _last_fitting(self, tested: Sequence[Pending]) -> int:
        vain: set[tuple[str, tuple[Amount, ...]]] = set()
        last = -1
        for number in range(len(tested) - 1, -1, -1):
            kind = tested[number].job.partition, tested[number].each
            if kind not in vain:
                if tested[number].job.id not in self.running and self._place(tested[number], self.free, self.all_nodes):
                    return number
                vain.add(kind)
        return last

    def _earliest(self, pending: Pending, slots: Sequence[Slot]) -> tuple[float, list[int]]:
        """Return a job's earliest start that no reservation forbids, and its nodes; none where it is past the window.

        The start is sought from the beginning of one slot after the other, on nodes that no reservation has until the
        job's limit.
        """
        later_s: float | None = self.now_s
        last_s = self.now_s + self.rules.window_s
        while later_s is not None and later_s <= last_s:
            from_s = later_s
            nodes, later_s = self._free_of_reservations(slots, from_s, from_s + pending.limit_s)
            nodes &= self.nodes_of[pending.job.partition]
            if nodes.bit_count() < len(pending.each):
                continue
            start_s, spot = self._future_start(pending, nodes, from_s, later_s)
            if not spot:
                continue
            if start_s > self.now_s:
                taken = any(
                    one.end_s > start_s and one.begin_s < start_s + pending.limit_s and _bits(spot) & ~one.nodes
                    for one in slots
                )
                if taken:
                    later_s = start_s + (start_s <= from_s)
                    continue
                if later_s is not None and start_s > later_s:
                    continue
            return (start_s, spot) if start_s <= last_s else (inf, [])
        return inf, []

    def _free_of_reservations(self, slots: Sequence[Slot], from_s: float, to_s: float) -> tuple[int, float | None]:
        """Return the nodes without a reservation in this time, and the time from which further ones are free."""
        nodes, later_s = self.all_nodes, None
        last = len(slots) - 1
        for number in range(bisect_right(slots, from_s, key=attrgetter("end_s")), len(slots)):
            begin_s, end_s, own = slots[number]
            if later_s is None and number < last and slots[number + 1].nodes & ~(own & nodes):
                later_s = end_s
            if begin_s > to_s:
                if later_s is None and number + 1 < last:
                    later_s = slots[number + 1].end_s
                break
            nodes &= own
            if not nodes and later_s is not None:
                break
        return nodes, later_s

    def _future_start(self, pending: Pending, among: int, from_s: float, to_s: float | None) -> tuple[float, list[int]]:
        """Return a job's start on these nodes once running jobs have ended by their limits, and its nodes.

        Jobs whose limits end in one window of time are taken away together, and each window is longer than the one
        before it; jobs whose limits end after ``to_s`` stay.
        """
        future, need, count = self._future(), pending.each[0], len(pending.each)
        if from_s <= self.now_s and (spot := _choose(future.fitting(need, 0) & among, count)):
            return self.now_s, spot
        # 1. Running jobs over by then are gone.
        first = bisect_right(future.ends_s, from_s)
        if spot := _choose(future.fitting(need, first) & among, count):
            return max(from_s, self.now_s), spot
        # 2. The others on these nodes go by windows.
        coming, ends_s = future.on(among)
        begin = bisect_left(coming, first)
        end = len(coming) if to_s is None else bisect_right(ends_s, to_s)
        for gone in self._windows(ends_s[begin:end]):
            until = begin + gone
            if spot := _choose(future.fitting(need, coming[until - 1] + 1) & among, count):
                there = _bits(spot)
                last = next(one for one in reversed(coming[:until]) if future.nodes[one] & there)
                return max(future.ends_s[last], from_s), spot
        return inf, []

    def _windows(self, ends_s: Sequence[float]) -> Iterator[int]:
        """Yield how many of the running jobs, in order of their ends, are gone after each window."""
        window_s = FIRST_WINDOW_S
        bound_s = (ends_s[0] // window_s + 1) * window_s if ends_s else 0.0
        gone = 0
        while gone < len(ends_s):
            gone = max(gone + 1, bisect_right(ends_s, bound_s + window_s))
            yield gone
            while gone < len(ends_s) and window_s < LAST_WINDOW_S:
                window_s = window_s + self.rules.precision_s if self.rules.precision_s else 2 * window_s
                if ends_s[gone] <= bound_s + window_s:
                    break

    def _future(self) -> _Future:
        """Return the ends of the running jobs by their limits; the same object until a job starts or time passes."""
        if self.future is None or self.future.now_s != self.now_s:
            self.future = _Future(self.now_s, self.free, self.running.values())
        return self.future

    # --- Results ----------------------------------------------------------------------------------------

    def _start_up_s(self, job: TraceJob) -> float:
        return self.setup.costs.start_s if job.startup_s is None else job.startup_s

    def _speed(self, job: TraceJob, shares: Sequence[tuple[int, Amount]]) -> float:
        placement = tuple(Share(self.nodes[at].name, *amount) for at, amount in shares)
        return placement_speed(job.truth or job.profile, placement, self.types)

    def _job_result(
        self, job: TraceJob, start_s: float, finish_s: float | None, shares: Sequence[tuple[int, Amount]]
    ) -> JobResult:
        first_s = start_s + self._start_up_s(job) + FIRST_ITERATIONS * job.iteration_s / self._speed(job, shares)
        reached = first_s <= (self.now_s if finish_s is None else finish_s)
        attained_s = (self.now_s if finish_s is None else finish_s) - start_s
        hundred_s = first_s - job.submit_s if reached else None
        return JobResult(
            job.id, job.submit_s, start_s, finish_s, job.gpus, job.model, job.user, job.work_s, attained_s, hundred_s
        )

    def _sample(self) -> None:
        used = [node.gpus - free[0] for node, free in zip(self.nodes, self.free, strict=True)]
        cpus = sum(node.cpus - free[1] for node, free in zip(self.nodes, self.free, strict=True))
        fits = any(
            self._place(pending, self.free, self.all_nodes)
            for pending in {(one.job.partition, one.each): one for one in self.queue if one.job.gpus}.values()
        )
        if self.samples and self.samples[-1].time_s == self.now_s:
            self.samples.pop()
        held, waiting = sum(used), sum(pending.job.gpus > 0 for pending in self.queue)
        running = self.arrived - len(self.done) - waiting
        self.samples.append(Sample(self.now_s, held, cpus, running, waiting, held, (self.gpus - held) if fits else 0))

    def _result(self, end_s: float) -> Result:
        self.now_s = end_s
        jobs = dict(self.done)
        for job in self.arrivals:
            if not job.gpus:
                continue
            if job.id in self.running:
                _, shares, start_s = self.running[job.id]
                jobs[job.id] = self._job_result(job, start_s, None, shares)
            elif job.id not in jobs and job.submit_s <= end_s:
                jobs[job.id] = JobResult(
                    job.id, job.submit_s, None, None, job.gpus, job.model, job.user, job.work_s, 0.0, None
                )
        ordered = tuple(jobs[job.id] for job in self.arrivals if job.id in jobs)
        return Result(
            jobs=ordered,
            samples=tuple(self.samples),
            counts=Counts(),
            gpus=self.gpus,
            cpus=sum(node.cpus for node in self.nodes),
            end_s=end_s,
            unfinished=tuple(JobKey(job.id, 0) for job in sorted(ordered, key=lambda job: job.id) if not job.finish_s),
        )


def _next(now_s: float, every_s: float) -> float:
    """Return the next multiple of an interval, from now on."""
    return ceil(now_s / every_s) * every_s


def _bits(spot: Sequence[int]) -> int:
    """Return nodes as bits."""
    return sum(1 << at for at in spot)


def _choose(fitting: int, count: int) -> list[int]:
    """Return so many of the nodes with room, given as bits, or nothing; see ``_Slurm._place``."""
    if count == 1:
        return [(fitting & -fitting).bit_length() - 1] if fitting else []
    if fitting.bit_count() < count:
        return []
    # 1. Runs of adjacent nodes.
    runs: list[list[int]] = []
    for at in range(fitting.bit_length()):
        if fitting >> at & 1:
            if runs and runs[-1][-1] == at - 1:
                runs[-1].append(at)
            else:
                runs.append([at])
    # 2. The smallest run that has as many as are left, or else the largest.
    chosen: list[int] = []
    while len(chosen) < count:
        left = count - len(chosen)
        best = min(runs, key=lambda run: len(run) if len(run) >= left else inf)
        if len(best) < left:
            best = max(runs, key=len)
        chosen += best[:left]
        runs.remove(best)
    return sorted(chosen)


def _reserve(slots: list[Slot], start_s: float, end_s: float, nodes: int) -> None:
    """Take nodes out of the slots in this time; a slot that it cuts becomes two or three."""
    cut = []
    for one in slots:
        begin_s, stop_s = max(one.begin_s, start_s), min(one.end_s, end_s)
        if begin_s >= stop_s:
            cut.append(one)
            continue
        parts = [
            Slot(one.begin_s, begin_s, one.nodes), Slot(begin_s, stop_s, one.nodes & ~nodes),
            Slot(stop_s, one.end_s, one.nodes),
        ]  # fmt: skip
        cut += [part for part in parts if part.begin_s < part.end_s]
    slots[:] = cut


def _fits(need: Sequence[int], free: Sequence[int]) -> bool:
    return need[0] <= free[0] and need[1] <= free[1] and need[2] <= free[2]
