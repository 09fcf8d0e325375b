"""Slurm without Cadenza on a trace: the main scheduler and backfill, no preemption; what completion times compare with.

Sources: slurm.conf, ``SchedulerParameters`` (sched/backfill); EASY backfill after Lifka (JSSPP 1995).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple, TypeAlias

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.model import JobKey, Node, Share
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.job import FIRST_ITERATIONS
from cadenza.policies.simulator.run_values import Counts, JobResult, Result, Sample, Setup

Amount: TypeAlias = tuple[int, int, int]
"""GPUs, CPUs and MB."""
NOTHING: Amount = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Backfill:
    """Limits of a backfill scheduler; the defaults are those of sched/backfill. Times in seconds."""

    interval_s: float = 30.0
    """``bf_interval``: time between two passes."""
    window_s: float = 86_400.0
    """``bf_window``: a job that could only start later than this gets no reservation."""
    max_jobs: int = 100
    """``bf_max_job_test``: jobs in order of priority that a pass looks at."""
    max_reservations: int = 1_000_000
    """Jobs that get a reservation in a pass."""
    whole_nodes: bool = True
    """True if a reservation keeps other jobs off its nodes, as Slurm's does; else only off what it will use there."""
    size_s: float = 0.0
    """Age in queue that asking for all GPUs is worth: the ratio of PriorityWeightJobSize to Age, times MaxAge."""


SLURM = Backfill()
EASY = Backfill(window_s=inf, max_jobs=1_000_000, max_reservations=1, whole_nodes=False)
"""One reservation, for the first job that does not fit."""


class Pending(NamedTuple):
    """A job in the queue: its priority comes first; ``each`` is what it asks for on each of its nodes."""

    order: tuple[float, float, int]
    job: TraceJob
    each: tuple[Amount, ...]
    limit_s: float


class Reservation(NamedTuple):
    """A time in which a node is kept for a job; ``left`` is what others may use there."""

    start_s: float
    end_s: float
    left: list[int]


def time_limit_s(job: TraceJob) -> float:
    """Return a job's time limit: as the trace says, else twice its run time + 300 s."""
    return 2 * job.work_s + 300 if job.time_limit_s is None else job.time_limit_s


def simulate_slurm(jobs: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup, rules: Backfill = SLURM) -> Result:
    """Return the result of Slurm alone: jobs start in order of priority, and later ones where they delay none.

    A job of up to a node's GPUs lies within one node, the fullest that has room; a wider one has an even part on each
    of the fewest nodes. All jobs are taken from their submission to their end, or to the setup's horizon. Time limits
    end no job.
    """
    return _Slurm(jobs, [node for node in nodes if node.lane == 0], setup, rules).run()


class _Slurm:
    def __init__(self, jobs: Sequence[TraceJob], nodes: Sequence[Node], setup: Setup, rules: Backfill) -> None:
        self.nodes, self.setup, self.rules = nodes, setup, rules
        self.types = {node.name: node.gpu_type for node in nodes}
        self.free = [[node.gpus, node.cpus, node.memory_mb] for node in nodes]
        self.gpus = sum(node.gpus for node in nodes)
        first = max(nodes, key=lambda node: (node.gpus, node.cpus, node.name))
        self.fair, self.widest = (first.cpus / first.gpus, first.memory_mb / first.gpus), first.gpus
        self.arrivals = sorted(jobs, key=lambda job: (job.submit_s, job.id))
        self.queue: list[Pending] = []
        self.ends: list[tuple[float, int, TraceJob]] = []
        self.running: dict[int, tuple[float, tuple[tuple[int, Amount], ...], float]] = {}
        """By job: the end by its time limit, what it has on which nodes, and its start."""
        self.done: dict[int, JobResult] = {}
        self.samples: list[Sample] = []
        self.now_s = 0.0

    def run(self) -> Result:
        """Run all events; a pass of backfill follows a change at the next multiple of its interval."""
        arrived, pass_s, horizon_s = 0, inf, self.setup.horizon_s or inf
        while arrived < len(self.arrivals) or self.running:
            # 1. The next event.
            arrival_s = self.arrivals[arrived].submit_s if arrived < len(self.arrivals) else inf
            next_s = min(arrival_s, self.ends[0][0] if self.ends else inf, pass_s)
            if next_s >= horizon_s:
                break
            self.now_s = next_s
            # 2. Ends and arrivals, after which the main scheduler starts jobs from the head of the queue.
            changed = self._end_jobs()
            while arrived < len(self.arrivals) and self.arrivals[arrived].submit_s <= self.now_s:
                insort(self.queue, self._pending(self.arrivals[arrived]))
                arrived, changed = arrived + 1, True
            if changed:
                self._start_head()
                every_s = self.rules.interval_s
                pass_s = min(pass_s, ceil(self.now_s / every_s) * every_s) if self.queue else inf
            # 3. Backfill.
            if pass_s <= self.now_s:
                self._backfill()
                pass_s = inf
            self._sample()
        return self._result(min(self.now_s if horizon_s == inf else horizon_s, horizon_s))

    # --- The queue --------------------------------------------------------------------------------------

    def _pending(self, job: TraceJob) -> Pending:
        count = -(-job.gpus // self.widest)
        memory_mb = self.fair[1] if job.memory_gb_per_gpu is None else job.memory_gb_per_gpu * MB_PER_GB
        widths = [job.gpus * (at + 1) // count - job.gpus * at // count for at in range(count)]
        each = tuple((gpus, int(self.fair[0] * gpus), int(memory_mb * gpus)) for gpus in sorted(widths, reverse=True))
        order = (job.submit_s - self.rules.size_s * job.gpus / self.gpus, job.submit_s, job.id)
        return Pending(order, job, each, time_limit_s(job))

    def _end_jobs(self) -> bool:
        ended = False
        while self.ends and self.ends[0][0] <= self.now_s:
            finish_s, _, job = heappop(self.ends)
            _, shares, start_s = self.running.pop(job.id)
            for at, amount in shares:
                for kind, value in enumerate(amount):
                    self.free[at][kind] += value
            self.done[job.id] = self._job_result(job, start_s, finish_s, shares)
            ended = True
        return ended

    def _start_head(self) -> None:
        while self.queue and (spot := self._place(self.queue[0], ())):
            self._start(self.queue.pop(0), spot)

    def _start(self, pending: Pending, spot: Sequence[int]) -> None:
        """Start a job with its parts on these nodes."""
        job = pending.job
        shares = tuple(zip(spot, pending.each, strict=True))
        for at, amount in shares:
            for kind, value in enumerate(amount):
                self.free[at][kind] -= value
        self.running[job.id] = (self.now_s + pending.limit_s, shares, self.now_s)
        heappush(self.ends, (self.now_s + self._start_up_s(job) + job.work_s / self._speed(job, shares), job.id, job))

    def _place(self, pending: Pending, reserved: Sequence[Sequence[Reservation]]) -> list[int]:
        """Return the nodes on which a job can start now without delay to a reservation, the fullest first."""
        end_s, chosen = self.now_s + pending.limit_s, []
        need = pending.each[0]
        for at in sorted(range(len(self.free)), key=lambda at: (self.free[at][0], at)):
            if _fits(need, self.free[at]) and all(
                _fits(need, one.left) for one in (reserved[at] if reserved else ()) if one.start_s < end_s
            ):
                chosen.append(at)
                if len(chosen) == len(pending.each):
                    return chosen
        return []

    # --- Backfill ---------------------------------------------------------------------------------------

    def _backfill(self) -> None:
        """Look at the jobs in order of priority: each starts now, or gets a reservation for its earliest start."""
        rules, made = self.rules, 0
        reserved: list[list[Reservation]] = [[] for _ in self.nodes]
        planner = _Planner(self)
        kept: list[Pending] = []
        for number, pending in enumerate(self.queue):
            if number >= rules.max_jobs or not any(free[0] for free in self.free):
                kept.extend(self.queue[number:])
                break
            if spot := self._place(pending, reserved):
                self._start(pending, spot)
                planner = _Planner(self)
                for at, need in zip(spot, pending.each, strict=True):
                    for one in reserved[at]:
                        if one.start_s < self.now_s + pending.limit_s:
                            one.left[:] = [left - amount for left, amount in zip(one.left, need, strict=True)]
                continue
            kept.append(pending)
            if made < rules.max_reservations:
                made += planner.reserve(pending, reserved)
        self.queue[:] = kept

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
        fits = any(self._place(pending, ()) for pending in {one.each: one for one in self.queue}.values())
        if self.samples and self.samples[-1].time_s == self.now_s:
            self.samples.pop()
        held = sum(used)
        self.samples.append(
            Sample(self.now_s, held, cpus, len(self.running), len(self.queue), held, (self.gpus - held) if fits else 0)
        )

    def _result(self, end_s: float) -> Result:
        self.now_s = end_s
        jobs = dict(self.done)
        for job in self.arrivals:
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


class _Planner:
    """Earliest starts by the time limits of the jobs that run; made anew once another job runs."""

    def __init__(self, slurm: _Slurm) -> None:
        self._slurm = slurm
        self._freed: list[list[tuple[float, tuple[int, ...]]]] | None = None
        self._earliest: dict[tuple[int, Amount], float] = {}

    def reserve(self, pending: Pending, reserved: list[list[Reservation]]) -> bool:
        """Reserve nodes for a job at its earliest start; return False if that is beyond the window."""
        slurm, rules = self._slurm, self._slurm.rules
        need, length_s = pending.each[0], pending.limit_s
        # 1. On each node the first gap that is long enough; the job starts once it has as many nodes as it needs.
        gaps = sorted((self._gap_s(at, need, length_s, reserved[at], 0.0), at) for at in range(len(slurm.nodes)))
        start_s = gaps[len(pending.each) - 1][0] if len(gaps) >= len(pending.each) else inf
        horizon_s = slurm.now_s + rules.window_s
        while start_s < horizon_s:
            # 2. A gap that begins sooner has to reach there too.
            gaps = sorted((self._gap_s(at, need, length_s, reserved[at], start_s), at) for _, at in gaps)
            later_s = gaps[len(pending.each) - 1][0]
            if later_s <= start_s:
                break
            start_s = later_s
        if not start_s < horizon_s:
            return False
        # 3. On the fullest of the nodes.
        able = sorted((self._free_at(at, start_s), at) for gap_s, at in gaps if gap_s <= start_s)
        for (free, at), amount in zip(able, pending.each, strict=False):
            left = [0, 0, 0] if rules.whole_nodes else [a - b for a, b in zip(free, amount, strict=True)]
            reserved[at].append(Reservation(start_s, start_s + length_s, left))
            reserved[at].sort(key=lambda one: one.start_s)
        return True

    def _gap_s(self, at: int, need: Amount, length_s: float, reserved: Sequence[Reservation], from_s: float) -> float:
        """Return the first time from which a node has what a job needs for as long as its time limit."""
        start_s = max(self._first_fit_s(at, need), from_s)
        for one in reserved:
            if one.end_s <= start_s or _fits(need, one.left):
                continue
            if start_s + length_s <= one.start_s:
                break
            start_s = one.end_s
        return start_s

    def _first_fit_s(self, at: int, need: Amount) -> float:
        if (at, need) not in self._earliest:
            times = self._timeline(at)
            self._earliest[at, need] = next((time_s for time_s, free in times if _fits(need, free)), inf)
        return self._earliest[at, need]

    def _free_at(self, at: int, time_s: float) -> tuple[int, ...]:
        return [free for begin_s, free in self._timeline(at) if begin_s <= time_s][-1]

    def _timeline(self, at: int) -> Sequence[tuple[float, tuple[int, ...]]]:
        """Return the free resources of a node from now on, and from each end by a time limit."""
        if self._freed is None:
            slurm = self._slurm
            self._freed = [[(slurm.now_s, tuple(free))] for free in slurm.free]
            for end_s, shares, _ in sorted(slurm.running.values()):
                for node, amount in shares:
                    before = self._freed[node][-1][1]
                    after = tuple(a + b for a, b in zip(before, amount, strict=True))
                    self._freed[node].append((max(end_s, slurm.now_s), after))
        return self._freed[at]


def _fits(need: Sequence[int], free: Sequence[int]) -> bool:
    return need[0] <= free[0] and need[1] <= free[1] and need[2] <= free[2]
