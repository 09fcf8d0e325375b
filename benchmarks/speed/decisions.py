#!/usr/bin/env python3
"""Print how long one decision takes, snapshot in to decision out, when every job has a profile of its own.

The policy is fifo with our allocation; "allocation" is that part alone. 512 GPUs (64 nodes) with 600 jobs: from
scratch with profiles never seen before, and 200 steady rounds, in each of which 5 % of the jobs have ended and as many
are new. 10,000 nodes with 60,000 jobs from scratch, and smaller clusters for the growth: the exponent e of
time ~ nodes^e, by least squares. Each profile is one of Synergy's published models with 3 % noise on every point.

``--sharing`` measures the whole decision as the service ships it, with each way of sharing GPUs: 64 nodes, in two lanes
where jobs take turns, with 1,500 live jobs of 20 users and 1 to 16 GPUs, in rounds of a minute on a simulated cluster;
the default also with 512 nodes and 10,000 live jobs. Half of the jobs keep checkpoints, the users are in four accounts,
and fair share counts. In the first round all jobs are new; the steady rounds follow it. ``--share NAME`` measures one.

CPU time on one core (wall time as well; they differ where the machine is busy); from scratch the median of
``--repeat``. The exit code is 1 when a limit is missed.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import NamedTuple, TypeVar

import numpy as np

from cadenza.policies.allocation.cadenza.allocate import cadenza
from cadenza.policies.allocation.problem import Case, Server
from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Node, Options, Placement, Progress
from cadenza.policies.core.profile import Profile
from cadenza.policies.gc_pause import uncollected
from cadenza.policies.inputs.published import synergy_profiles
from cadenza.policies.inputs.queue_rules import USUAL_WEIGHTS, QueueRules, Weights
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.registry import warm
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.simulations.request import read_request

PARTITION = "gpu"
GPUS, CPUS, MEMORY_MB = 8, 24, 512000
NOISE = 0.03
ROUND_S = 300.0
CHANGED = 0.05
STEADY_MS, SCRATCH_MS, LARGE_MS = 10.0, 100.0, 2000.0
USERS, ACCOUNTS, SHARED_ROUND_S, GB_PER_GPU = 20, 4, 60.0, 30.0
MOVABLE = 0.5
ARRIVAL_S = 1920.0
"""Time between two submissions for each node, in seconds."""
WIDTHS, WIDTH_WEIGHTS = (1, 2, 4, 8, 16), (60, 15, 12, 10, 3)
RUN_LOG_MEAN, RUN_LOG_SIGMA, LEAST_RUN_S, MOST_RUN_S = 8.5, 1.6, 120.0, 2e6
"""Log-normal run times: median 82 minutes, mean five hours."""
SMALL_NODES, SMALL_JOBS = 64, 600
LARGE_NODES, JOBS_A_NODE = 10000, 6
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)

Result = TypeVar("Result")


class Shared(NamedTuple):
    """A way of sharing GPUs on a cluster of some size, and the goal of its decisions' p99."""

    share: str
    nodes: int
    jobs: int
    limit_ms: float


SHARINGS = (
    Shared("timeslice", 64, 1500, 50.0),
    Shared("gandiva", 64, 1500, 50.0),
    Shared("preemption", 64, 1500, 25.0),
    Shared("preemption", 512, 10000, 100.0),
)


class Timed(NamedTuple):
    """Result and duration of one decision."""

    placements: Mapping[JobKey, Placement]
    cpu_ms: float
    wall_ms: float


Decide = Callable[[float, Sequence[Job], int], Timed]
"""Time, jobs in order and how many are to run; to a timed decision."""


@dataclass(frozen=True)
class Figure:
    """One line of the table. Times in milliseconds of CPU; ``ratio`` is to the limit, where there is one."""

    name: str
    cpu_ms: float
    wall_ms: float
    limit_ms: float | None = None

    @property
    def ratio(self) -> float | None:
        """Return the part of the limit that was used."""
        return None if self.limit_ms is None else self.cpu_ms / self.limit_ms


class Jobs:
    """An endless supply of jobs, each with a profile of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.models = list(synergy_profiles().values())
        self.made = 0

    def take(self, count: int) -> list[Job]:
        """Return new jobs with one GPU."""
        picks = self.rng.integers(len(self.models), size=count)
        grid = np.shape(self.models[0].throughput)
        noise = 1 + NOISE * self.rng.standard_normal((count, *grid))
        return [self._job(self.models[pick], one) for pick, one in zip(picks, noise, strict=True)]

    def _job(self, model: Profile, noise: np.ndarray) -> Job:
        self.made += 1
        points = tuple(map(tuple, (np.array(model.throughput) * noise).tolist()))
        return Job(
            JobKey(self.made, 0),
            "user",
            "",
            PARTITION,
            "",
            "PENDING",
            1,
            3,
            64000,
            1,
            float(self.made),
            slurm_priority=1,
            options=Options(),
            profile=replace(model, throughput=points, declared_best=None),
            progress=Progress(float(self.made), total_s=36000.0),
        )


def whole(nodes: int) -> Decide:
    """Return the decision from snapshot to actions."""
    policy = build("fifo", "cadenza", settings=PolicySettings(partitions=frozenset({PARTITION})))
    made = tuple(
        Node(f"n{number:05}", f"n{number:05}", 0, CPUS, MEMORY_MB, GPUS, partitions=(PARTITION,))
        for number in range(nodes)
    )

    def decide(now_s: float, jobs: Sequence[Job], _: int) -> Timed:
        snapshot = ClusterSnapshot(now_s, made, tuple(jobs))
        decision, cpu_ms, wall_ms = timed(lambda: policy.decide(snapshot, Memory()))
        placements = {job.key: job.placement for job in jobs}
        placements.update({action.job: getattr(action, "shares", ()) for action in decision.actions})
        return Timed(placements, cpu_ms, wall_ms)

    return decide


def alone(nodes: int) -> Decide:
    """Return the allocation by itself."""
    servers = tuple(Server(f"n{number:05}", GPUS, CPUS, MEMORY_MB) for number in range(nodes))

    def decide(now_s: float, jobs: Sequence[Job], runnable: int) -> Timed:
        case = Case(now_s, servers, tuple(jobs), runnable)
        plan, cpu_ms, wall_ms = timed(lambda: cadenza(case))
        return Timed(plan.placements, cpu_ms, wall_ms)

    return decide


def timed(call: Callable[[], Result]) -> tuple[Result, float, float]:
    """Return a call's result and its CPU and wall time, milliseconds; no cycles are collected, as in the service."""
    with uncollected():
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        return result, (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def scratch(decide: Decide, nodes: int, jobs: Sequence[Job], repeat: int) -> Timed:
    """Return the median decision (by CPU time) for jobs none of which runs, with profiles as if never seen before."""
    results = []
    for _ in range(repeat):
        for job in jobs:
            if job.profile is not None:
                job.profile.derived.clear()
        gc.collect()
        results.append(decide(0.0, jobs, min(len(jobs), nodes * GPUS)))
    return sorted(results, key=lambda one: one.cpu_ms)[repeat // 2]


def steady(decide: Decide, nodes: int, supply: Jobs, jobs: Sequence[Job], rounds: int) -> tuple[list[Timed], float]:
    """Return rounds, in each of which some jobs have ended and as many are new, and the moves a job and hour."""
    series, moves, now = [], 0, list(jobs)
    room = nodes * GPUS
    last = decide(0.0, now, room).placements
    for number in range(rounds):
        now = [applied(job, last.get(job.key, ())) for job in now]
        ended = set(supply.rng.choice(room, size=round(CHANGED * len(now)), replace=False).tolist())
        now = [job for at, job in enumerate(now) if at not in ended] + supply.take(len(ended))
        one = decide(ROUND_S * (number + 1), now, room)
        series.append(one)
        moves += sum(moved(job, one.placements.get(job.key, ())) for job in now)
        last = one.placements
    return series, moves / (rounds * ROUND_S / 3600 * room)


def applied(job: Job, placement: Placement) -> Job:
    """Return a job as it is once a decision was carried out."""
    if job.placement == placement:
        return job
    state = "RUNNING" if placement else "PENDING"
    return replace(job, state=state, placement=placement, nodes=tuple(share.node for share in placement))


def moved(job: Job, placement: Placement) -> bool:
    """Return whether a running job goes to other nodes."""
    return bool(job.placement and placement) and job.placement[0].node != placement[0].node


def quantile(values: Sequence[float], part: float) -> float:
    """Return the least value that so large a part does not exceed."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def small(name: str, decide: Decide, rounds: int, repeat: int, *, limited: bool = False) -> tuple[list[Figure], float]:
    """Measure 512 GPUs, from scratch, then steady; return the figures and the moves a job and hour."""
    supply = Jobs(1)
    jobs = supply.take(SMALL_JOBS)
    decide(0.0, jobs, SMALL_NODES * GPUS)
    first = scratch(decide, SMALL_NODES, jobs, repeat)
    series, moves = steady(decide, SMALL_NODES, supply, jobs, rounds)
    cpu, wall = [one.cpu_ms for one in series], [one.wall_ms for one in series]
    what = f"512 GPUs, 600 jobs, {name}"
    return [
        Figure(f"{what}, from scratch", first.cpu_ms, first.wall_ms, SCRATCH_MS if limited else None),
        Figure(f"{what}, steady, median", statistics.median(cpu), statistics.median(wall)),
        Figure(f"{what}, steady, p99", quantile(cpu, 0.99), quantile(wall, 0.99), STEADY_MS if limited else None),
        Figure(f"{what}, steady, most", max(cpu), max(wall)),
    ], moves


def shared_jobs(one: Shared, rounds: int, profiles: Mapping[str, Profile]) -> list[TraceJob]:
    """Return jobs that are all there at the start, and new ones in each round."""
    draw, models = Random(1), sorted(profiles.items())
    jobs, each_s = [], ARRIVAL_S / one.nodes
    for number in range(one.jobs + round(rounds * SHARED_ROUND_S / each_s)):
        model, profile = draw.choice(models)
        run_s = min(max(draw.lognormvariate(RUN_LOG_MEAN, RUN_LOG_SIGMA), LEAST_RUN_S), MOST_RUN_S)
        submit_s = max(number - one.jobs, 0) * each_s
        (gpus,) = draw.choices(WIDTHS, WIDTH_WEIGHTS)
        user = draw.randrange(USERS)
        jobs.append(
            TraceJob(
                number + 1, submit_s, gpus, run_s, model, profile, user=f"user{user}", account=f"team{user % ACCOUNTS}",
                memory_gb_per_gpu=GB_PER_GPU, checkpoints=draw.random() < MOVABLE,
            )
        )  # fmt: skip
    return jobs


def shared(one: Shared, rounds: int) -> list[Figure]:
    """Measure the shipped decision with one way of sharing, on a simulated cluster."""
    words = {"share": one.share, "nodes": f"{one.nodes}x8:24:500", "workload": "synergy:load=8,jobs=10"}
    request = read_request(words, ())
    cpu, wall, live = [], [], []

    def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
        decision, cpu_ms, wall_ms = timed(lambda: _explained(request.policy.decide(snapshot, memory)))
        cpu.append(cpu_ms)
        wall.append(wall_ms)
        live.append(len(snapshot.jobs))
        return decision

    queue = QueueRules(weights=Weights(**USUAL_WEIGHTS))
    horizon_s = rounds * SHARED_ROUND_S
    setup = replace(request.setup, rounds_on_events=False, skip=False, horizon_s=horizon_s, queue=queue)
    jobs = shared_jobs(one, rounds, request.profiles)
    simulate(jobs, request.nodes, replace(request.policy, decide=decide), setup)
    what = f"{one.nodes * GPUS:,} GPUs, {min(live):,} to {max(live):,} jobs, {one.share}"
    return [
        Figure(f"{what}, from scratch", cpu[0], wall[0]),
        Figure(f"{what}, steady, median", statistics.median(cpu[1:]), statistics.median(wall[1:])),
        Figure(f"{what}, steady, p99", quantile(cpu[1:], 0.99), quantile(wall[1:], 0.99), one.limit_ms),
        Figure(f"{what}, steady, most", max(cpu[1:]), max(wall[1:])),
    ]


def _explained(decision: Decision) -> Decision:
    """Return a decision once its sentences are worked out, as the service does when it writes a round down."""
    return replace(decision, reasons=dict(decision.reasons.items()))


def growth(largest: int, repeat: int) -> tuple[list[Figure], float]:
    """Measure decisions from scratch over cluster sizes, and return the exponent of their growth."""
    figures = []
    sizes = [size for size in SIZES if size < largest] + [largest]
    for nodes in sizes:
        jobs = Jobs(2).take(nodes * JOBS_A_NODE)
        one = scratch(whole(nodes), nodes, jobs, repeat)
        limit = LARGE_MS if nodes == LARGE_NODES else None
        figures.append(Figure(f"{nodes} nodes, {len(jobs)} jobs, from scratch", one.cpu_ms, one.wall_ms, limit))
    slope = np.polyfit(np.log(sizes), np.log([figure.cpu_ms for figure in figures]), 1)[0]
    return figures, float(slope)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200, help="steady rounds; default: 200")
    parser.add_argument("--repeat", type=int, default=5, help="decisions from scratch, of which the median; default: 5")
    parser.add_argument("--largest", type=int, default=LARGE_NODES, help="nodes of the largest cluster; default: 10000")
    parser.add_argument("--sharing", action="store_true", help="measure the ways of sharing GPUs instead")
    parser.add_argument(
        "--share", choices=sorted({one.share for one in SHARINGS}), help="with --sharing: this one only"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.sharing:
        asked = [one for one in SHARINGS if arguments.share in (None, one.share)]
        figures = [figure for one in asked for figure in shared(one, arguments.rounds)]
        if arguments.json:
            print(json.dumps({"figures": [asdict(figure) | {"ratio": figure.ratio} for figure in figures]}))
        else:
            show(figures)
        return int(any(figure.ratio is not None and figure.ratio > 1 for figure in figures))
    warm("cadenza")
    figures, moves = small("decision", whole(SMALL_NODES), arguments.rounds, arguments.repeat, limited=True)
    figures += small("allocation", alone(SMALL_NODES), arguments.rounds, arguments.repeat)[0]
    small_mb = peak_mb()
    grown, exponent = growth(arguments.largest, arguments.repeat)
    figures += grown
    peaks = {"512 GPUs": small_mb, f"{arguments.largest} nodes": peak_mb()}
    if arguments.json:
        rows = [asdict(figure) | {"ratio": figure.ratio} for figure in figures]
        print(json.dumps({"figures": rows, "exponent": exponent, "moves_per_job_hour": moves, "peak_mb": peaks}))
    else:
        show(figures)
        print(f"time grows as nodes^{exponent:.2f}; {moves:.3f} moves a job and hour in the steady rounds")
        print(
            "peak memory, jobs and profiles included: " + ", ".join(f"{name} {mb:.0f} MB" for name, mb in peaks.items())
        )
    return int(any(figure.ratio is not None and figure.ratio > 1 for figure in figures))


def peak_mb() -> float:
    """Return the most memory that this process has had, MB; what the benchmark itself keeps included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show(figures: Sequence[Figure]) -> None:
    """Print the table."""
    print(f"{'':58}{'CPU ms':>9}{'wall ms':>9}  limit")
    for one in figures:
        limit = f"{one.limit_ms:.0f} ms, {one.ratio:.2f} of it" if one.limit_ms is not None else ""
        print(f"{one.name:58}{one.cpu_ms:9.2f}{one.wall_ms:9.2f}  {limit}")


if __name__ == "__main__":
    sys.exit(main())
