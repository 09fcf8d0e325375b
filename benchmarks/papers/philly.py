#!/usr/bin/env python3
"""The default against Slurm as sites run it: each row of the table with its goal, for each sample.

The yardstick is the simulator's Slurm: multifactor priority (age, fair share by fair tree, job size, QOS), backfill
with Slurm's defaults, and limits that users give. EASY and the ideal LAS stand beside it. Samples: windows of two weeks
of Microsoft's Philly trace at three loads (``14:28@0.9``), with tight limits (2 x run time + 300 s) and with loose ones
(``14:28@0.9-loose``: three or seven days for 40 % of the jobs), on 16 nodes of 8 GPUs; ``history``, a made-up month of
a site with 20 nodes; ``large``, a mix with a few large jobs. A draw says for each job whether it keeps checkpoints, so
that it can move. All costs are on; a move takes 60 s of a job's GPUs where no other time is said. A figure is the ratio
of our mean completion time to Slurm's where it says nothing else. Fair GPU time is what all accounts had together on
each day on which the live jobs ask for more than the cluster has, shared out in proportion to the accounts' shares and
to none more than its jobs ask for; rows say which part of it they lack. Exit code 1 when a row is missed.

    CADENZA_DATA=FOLDER benchmarks/papers/philly.py                       # many hours on one processor
    CADENZA_DATA=FOLDER benchmarks/papers/philly.py --samples history,28:42@1.0 --rows 10,25,50,100 --draws 3
    CADENZA_DATA=FOLDER benchmarks/papers/philly.py --samples '*@1.1*' --rows none --jobs 2
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from cadenza.policies.inputs.cluster import read_cluster
from cadenza.policies.inputs.queue_rules import Account, Qos
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.ideal_las import ideal_las
from cadenza.policies.simulator.run_values import Result
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.slurm_baseline import first_come, simulate_slurm
from cadenza.slurm_plugin.simulations.request import Request, Site, read_request

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "replay"))

from philly_fairness import Floats, Lack, Recorder, Span, by_day, lack
from philly_sample import (
    DAY_S,
    MEMORY_GB,
    PER_NODE,
    Population,
    history_population,
    large_population,
    philly_population,
    read_philly,
)
from published_data import needed

WINDOWS, LOADS = ((14, 28), (28, 42)), (0.9, 1.0, 1.1)
HOUR_S, MOVE_S = 3600.0, 60.0
COSTS = "migrate_s = {0}\nrestart_s = {0}\n"
LEAST_JOBS = 20
"""Jobs of an account, a user or a class that is looked at by itself."""
LENGTHS_S = (600.0, 3600.0, 36000.0)
WIDTHS = (2, 8, 9)
"""Bounds of the classes of jobs: by run time, and by GPUs (1, 2 to 7, 8, more)."""
LIARS = 1 / 12
PIECE_S, MOST_PIECES, PIECES_FROM = 1800.0, 48, 10**7
"""Length of the pieces of a job that comes in some, their number at most, and their ids."""
NEWCOMER = "newcomer"
"""The account and user of jobs that a case adds."""
LIMITED, HIGH_QOS, LONG_QOS_S = "limited", "high", 4 * HOUR_S

Flags: TypeAlias = NDArray[np.bool_]


# --- Runs ----------------------------------------------------------------------------------------------------------


class Play(NamedTuple):
    """One run: a sample in a case, under a scheduler, with a draw of the jobs that keep checkpoints."""

    sample: str
    case: str = "plain"
    scheduler: str = "default"
    part: float = 0.0
    """Part of the jobs that keep checkpoints."""
    draw: int = 1
    opted_in: str = "all"
    """``all``, ``none``, or ``movable``: those that keep checkpoints alone."""
    move_s: float = MOVE_S
    lie: str = ""
    """What some of the jobs do: ``hide`` their checkpoints, ``boast`` of some, or ``chain``: come in pieces."""


@dataclass(frozen=True)
class Outcome:
    """The times of a run's jobs in order of submission, seconds since the submission of each, and their restarts."""

    jct_s: Floats
    first_s: Floats
    restarts: Floats
    gpu_s: Floats
    """GPU time that each account had, by day and account; the accounts are in the order of their names."""


def movable(jobs: int, part: float, draw: int) -> Flags:
    """Return which jobs keep checkpoints."""
    return np.random.default_rng(draw).random(jobs) < part


def liars(keeps: Flags, play: Play) -> Flags:
    """Return which jobs lie: of those that keep checkpoints, or of those that keep none where they boast."""
    lie = np.random.default_rng(50 + play.draw).random(len(keeps)) < LIARS
    return lie & (~keeps if play.lie == "boast" else keeps)


def _window(days: tuple[int, int], load: float, loose: bool) -> Population:  # noqa: FBT001
    return philly_population(read_philly(needed("philly-2017-09-10.csv")), days, load, loose=loose)


SAMPLES: dict[str, Callable[[], Population]] = {
    "history": history_population,
    **{
        f"{days[0]}:{days[1]}@{load}{'-loose' if loose else ''}": partial(_window, days, load, loose)
        for days in WINDOWS
        for load in LOADS
        for loose in (False, True)
    },
    "large": large_population,
}


@lru_cache(maxsize=4)
def population(sample: str, case: str) -> Population:
    """Return a sample's jobs in a case."""
    return CASES[case](SAMPLES[sample]())


def _flood(plain: Population) -> Population:
    """Add a user who submits 5,000 jobs of one GPU and five minutes (the median) within the second day."""
    chance = np.random.default_rng(3)
    runs_s, times = chance.lognormal(np.log(300.0), 1.0, 5000), DAY_S * (1 + chance.random(5000))
    return _with_newcomer(plain, [(at, 1, run_s, 4 * run_s + 600) for at, run_s in zip(times, runs_s, strict=True)])


def _wide(plain: Population) -> Population:
    """Add a user who submits a job of 16 GPUs and two hours each hour from the second day on."""
    times = np.arange(DAY_S, plain.jobs[-1].submit_s, HOUR_S)
    return _with_newcomer(plain, [(at, 2 * PER_NODE, 2 * HOUR_S, 4 * HOUR_S) for at in times])


def _with_newcomer(plain: Population, rows: Sequence[tuple[float, int, float, float]]) -> Population:
    first = max(job.id for job in plain.jobs) + 1
    added = [
        TraceJob(
            first + at, float(submit_s), gpus, float(run_s), user=NEWCOMER, account=NEWCOMER,
            memory_gb_per_gpu=MEMORY_GB, time_limit_s=float(limit_s),
        )
        for at, (submit_s, gpus, run_s, limit_s) in enumerate(rows)
    ]  # fmt: skip
    return Population.of(plain.cluster, (*plain.jobs, *added))


def _long_limits(plain: Population) -> Population:
    chance, week_s = np.random.default_rng(3), 7 * DAY_S
    draws = chance.random(len(plain.jobs)) < 0.5  # noqa: PLR2004
    jobs = [
        replace(job, time_limit_s=max(job.time_limit_s or 0.0, week_s)) if long else job
        for job, long in zip(plain.jobs, draws, strict=True)
    ]
    return replace(plain, jobs=tuple(jobs))


def _limited(plain: Population) -> Population:
    """Let the account with most GPU time have a tenth of the GPUs at a time (GrpTRES), and its widest job at least."""
    used: dict[str, float] = defaultdict(float)
    for job in plain.jobs:
        used[job.account] += job.gpus * job.work_s
    name = max(used, key=lambda account: used[account])
    most = max(job.gpus for job in plain.jobs if job.account == name)
    gpus = max(most, sum(node.gpus for node in read_cluster(plain.cluster)) // 10)
    limited = msgspec.structs.replace(plain.rules.accounts.get(name, Account()), gpus=gpus)
    rules = msgspec.structs.replace(plain.rules, accounts=plain.rules.accounts | {name: limited})
    jobs = [replace(job, tags={LIMITED: "yes"}) if job.account == name else job for job in plain.jobs]
    return replace(plain, jobs=tuple(jobs), rules=rules)


def _high_qos(plain: Population) -> Population:
    high = np.random.default_rng(7).random(len(plain.jobs)) < 0.1  # noqa: PLR2004
    jobs = [replace(job, qos=HIGH_QOS) if one else job for job, one in zip(plain.jobs, high, strict=True)]
    rules = msgspec.structs.replace(plain.rules, qos={HIGH_QOS: Qos(priority=1000)})
    return replace(plain, jobs=tuple(jobs), rules=rules)


CASES: dict[str, Callable[[Population], Population]] = {
    "plain": lambda plain: plain,
    "flood": _flood,
    "wide": _wide,
    "limits": _long_limits,
    "account": _limited,
    "qos": _high_qos,
}


@lru_cache(maxsize=4)
def _request(sample: str, case: str, move_s: float) -> Request:
    """Return what ``cadenza simulate`` would run for a sample, without options about the policy."""
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as costs:
        costs.write(COSTS.format(move_s))
        costs.flush()
        words = {"costs": costs.name}
        found = population(sample, case)
        return read_request(words, (), Site(found.jobs, read_cluster(found.cluster), queue=found.rules))


def played(play: Play) -> Outcome:
    """Run one play."""
    request = _request(play.sample, play.case, play.move_s)
    jobs = population(play.sample, play.case).jobs
    if play.scheduler == "las":
        gpus = sum(node.gpus for node in request.nodes)
        jct_s = np.array(ideal_las(jobs, gpus))
        return Outcome(jct_s, np.zeros(len(jobs)), np.zeros(len(jobs)), np.zeros((0, 0)))
    if play.scheduler in ("slurm", "easy"):
        run = simulate_slurm if play.scheduler == "slurm" else first_come
        recorder = Recorder(jobs)
        result = run(jobs, request.nodes, replace(request.setup, booked=recorder))
        return _outcome([(job,) for job in jobs], result, recorder)
    keeps = movable(len(jobs), play.part, play.draw)
    lies = liars(keeps, play) if play.lie else np.zeros(len(jobs), bool)
    managed = {"all": np.ones(len(jobs), bool), "none": np.zeros(len(jobs), bool), "movable": keeps}[play.opted_in]
    drawn = [replace(job, checkpoints=bool(keeps[at]), managed=bool(managed[at])) for at, job in enumerate(jobs)]
    told = [LIES[play.lie](job) if lies[at] else (job,) for at, job in enumerate(drawn)]
    ordered = sorted((one for pieces in told for one in pieces), key=lambda job: (job.submit_s, job.id))
    recorder = Recorder(ordered)
    result = simulate(ordered, request.nodes, request.policy, replace(request.setup, booked=recorder))
    return _outcome(told, result, recorder)


def _hiding(job: TraceJob) -> tuple[TraceJob, ...]:
    return (replace(job, checkpoints=False),)


def _boasting(job: TraceJob) -> tuple[TraceJob, ...]:
    return (replace(job, boasts=True),)


def _pieces(job: TraceJob) -> tuple[TraceJob, ...]:
    """Return a job as an array of pieces without checkpoints, of which one runs at a time."""
    count = max(min(int(job.work_s / PIECE_S), MOST_PIECES), 1)
    work_s, array = job.work_s / count, f"chain {job.id}"
    piece = replace(job, checkpoints=False, work_s=work_s, time_limit_s=2 * work_s + 300, array=array, array_limit=1)
    return tuple(replace(piece, id=PIECES_FROM + job.id * MOST_PIECES + at) for at in range(count))


LIES = {"hide": _hiding, "boast": _boasting, "chain": _pieces}


def _outcome(jobs: Sequence[Sequence[TraceJob]], result: Result, recorder: Recorder) -> Outcome:
    """Return the times of jobs, each of which may have been submitted in pieces."""
    found = {job.id: job for job in result.jobs}
    if any(one.finish_s is None or one.start_s is None for one in found.values()):
        raise SystemExit("a job has not ended")
    rows = [([found[piece.id] for piece in pieces], pieces[0].submit_s) for pieces in jobs]
    accounts = sorted({pieces[0].account for pieces in jobs})
    return Outcome(
        np.array([max(one.finish_s for one in pieces) - submit_s for pieces, submit_s in rows]),
        np.array([min(one.start_s for one in pieces) - submit_s for pieces, submit_s in rows]),
        np.array([sum(one.restarts + one.migrations for one in pieces) for pieces, _ in rows], dtype=float),
        by_day(recorder.spans, accounts, int(result.end_s // DAY_S) + 1),
    )


class Runs:
    """Runs plays, in worker processes if so asked, and none of them twice."""

    def __init__(self, jobs: int, keep: Path | None) -> None:
        self._pool = ProcessPoolExecutor(jobs) if jobs > 1 else None
        self._keep = keep
        self._known: dict[Play, Outcome] = {}

    def of(self, plays: Sequence[Play]) -> list[Outcome]:
        """Return the outcomes of plays."""
        missing = [play for play in dict.fromkeys(plays) if play not in self._known and not self._kept(play)]
        began = time.monotonic()
        for play, found in zip(missing, (self._pool.map if self._pool else map)(played, missing), strict=True):
            self._known[play] = found
            print(f"  {' '.join(map(str, play))}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if self._keep is not None:
                np.savez_compressed(self._file(play), **asdict(found))
        return [self._known[play] for play in plays]

    def _kept(self, play: Play) -> bool:
        if self._keep is None or not self._file(play).exists():
            return False
        with np.load(self._file(play)) as found:
            self._known[play] = Outcome(found["jct_s"], found["first_s"], found["restarts"], found["gpu_s"])
        return True

    def _file(self, play: Play) -> Path:
        name = "_".join(str(value) for value in play).replace(":", "-")
        return (self._keep or Path()) / f"{name}.npz"


# --- Rows ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One goal of a sample: the figure and its limit; None: a figure without a goal."""

    name: str
    figure: float
    limit: float | None = None
    note: str = ""

    @property
    def ok(self) -> bool:
        """Return True if the goal is met, or there is none."""
        return self.limit is None or self.figure <= self.limit + 1e-9


@dataclass(frozen=True)
class Table:
    """What the rows of one sample are made of."""

    sample: str
    draws: int
    runs: Runs

    def slurm(self, case: str = "plain") -> Outcome:
        """Return the yardstick."""
        return self.runs.of([Play(self.sample, case, "slurm")])[0]

    def drawn(self, part: float, case: str = "plain", **facts: object) -> list[tuple[Flags, Outcome]]:
        """Return for each draw which jobs keep checkpoints, and the default's outcome; where all do, there is one."""
        draws = range(1, (1 if part == 1.0 else self.draws) + 1)
        plays = [Play(self.sample, case, part=part, draw=draw, **facts) for draw in draws]  # type: ignore[arg-type]
        jobs = len(population(self.sample, case).jobs)
        return [(movable(jobs, part, play.draw), run) for play, run in zip(plays, self.runs.of(plays), strict=True)]


def ratio(ours: Floats, theirs: Floats, who: Flags | None = None) -> float:
    """Return the ratio of two means, of some jobs only where ``who`` says so; nan without any."""
    if who is not None:
        ours, theirs = ours[who], theirs[who]
    return float(ours.mean() / theirs.mean()) if len(ours) and theirs.mean() else float("nan")


def p99(times: Floats) -> float:
    """Return the 99th percentile."""
    return float(np.percentile(times, 99))


def spread(values: Sequence[float]) -> str:
    """Return the values of several draws."""
    return f"draws {', '.join(f'{value:.3f}' for value in values)}" if len(values) > 1 else ""


def mean_row(name: str, values: Sequence[float], limit: float | None = None) -> Row:
    """Return a row of the mean over the draws."""
    return Row(name, float(np.mean(values)), limit, spread(values))


def worst(keys: Sequence[object], ours: Floats, theirs: Floats, who: Flags) -> float:
    """Return the largest ratio of means of a group with enough jobs, of some jobs only."""
    groups: dict[object, list[int]] = defaultdict(list)
    for at in np.flatnonzero(who).tolist():
        groups[keys[at]].append(at)
    return max((ratio(ours[g], theirs[g]) for g in groups.values() if len(g) >= LEAST_JOBS), default=float("nan"))


def none_rows(table: Table) -> Iterator[Row]:
    """Yield how many jobs start or end at another time where none can move, and where none opted in."""
    slurm, sample = table.slurm(), table.sample
    plays = [Play(sample, part=0.0), Play(sample, part=1.0, opted_in="none")]
    for name, run in zip(("none can move", "none opted in"), table.runs.of(plays), strict=True):
        other = (run.first_s != slurm.first_s) | (run.jct_s != slurm.jct_s)
        yield Row(f"{name}: jobs with another start or end", float(other.sum()), 0)


def share_rows(table: Table, part: float) -> Iterator[Row]:
    """Yield the rows of a part of the jobs that can move."""
    slurm, jobs = table.slurm(), population(table.sample, "plain").jobs
    drawn = table.drawn(part)
    everyone = np.ones(len(jobs), bool)
    few, title = part < 0.5, f"{part:.0%} can move"  # noqa: PLR2004
    goal = None if few or part == 1.0 else 0.85 if table.sample == "history" else 0.93
    yield mean_row(f"{title}: all", [ratio(run.jct_s, slurm.jct_s) for _, run in drawn], goal)
    if part < 1.0:
        fixed = [ratio(run.jct_s, slurm.jct_s, ~keeps) for keeps, run in drawn]
        if few:
            yield Row(f"{title}: jobs that cannot, worst draw", max(fixed), 1.05, spread(fixed))
        yield mean_row(f"{title}: jobs that cannot", fixed, 1.0)
        yield mean_row(f"{title}: jobs that can", [ratio(run.jct_s, slurm.jct_s, keeps) for keeps, run in drawn], 1.0)
    late = [float((run.jct_s > slurm.jct_s + HOUR_S).mean()) for _, run in drawn]
    yield mean_row(f"{title}: part that ends more than an hour later", late, 0.06 if few else None)
    yield from _ideal_rows(table, slurm, drawn[0][1]) if part == 1.0 else ()
    if part < 1.0:
        yield mean_row(f"{title}: p99", [p99(run.jct_s) / p99(slurm.jct_s) for _, run in drawn])
    wide = np.array([job.gpus >= PER_NODE for job in jobs])
    waits = [ratio(run.first_s, slurm.first_s, wide) for _, run in drawn]
    yield mean_row(f"{title}: wait of jobs of 8 GPUs and more", waits, 1.0)
    accounts = [job.account for job in jobs]
    worst_accounts = [worst(accounts, run.jct_s, slurm.jct_s, everyone) for _, run in drawn]
    yield mean_row(f"{title}: worst account", worst_accounts, 1.15)
    yield from _fair_rows(title, lacked(table.sample, slurm), [lacked(table.sample, run) for _, run in drawn])
    if part < 1.0:
        classes = [(int(np.searchsorted(WIDTHS, job.gpus, "right")), int(np.searchsorted(LENGTHS_S, job.work_s)))
                   for job in jobs]  # fmt: skip
        found = [worst(classes, run.jct_s, slurm.jct_s, ~keeps) for keeps, run in drawn]
        yield mean_row(f"{title}: worst class of jobs that cannot", found, 1.3)
    yield Row(f"{title}: most moves of a job", max(float(run.restarts.max()) for _, run in drawn), 30)
    gpus = np.array([job.gpus for job in jobs])
    served = sum(job.gpus * job.work_s for job in jobs)
    cost = [float((run.restarts * gpus).sum()) * MOVE_S / served for _, run in drawn]
    yield mean_row(f"{title}: part of the GPU time that moves cost", cost, 0.03)


def lacked(sample: str, run: Outcome) -> Lack:
    """Return what a sample's accounts lack of their fair GPU time in a run."""
    found = population(sample, "plain")
    spans = (
        Span(job.account, job.submit_s, job.submit_s + jct_s, job.gpus)
        for job, jct_s in zip(found.jobs, run.jct_s.tolist(), strict=True)
    )
    names = sorted({job.account for job in found.jobs})
    shares = np.array([found.rules.accounts[name].share for name in names])
    wanted, gpus = by_day(spans, names, len(run.gpu_s)), sum(node.gpus for node in read_cluster(found.cluster))
    return lack(run.gpu_s, wanted, shares, gpus, names)


def _fair_rows(title: str, slurm: Lack, drawn: Sequence[Lack]) -> Iterator[Row]:
    def named(found: Iterable[tuple[float, str]]) -> str:
        return ", ".join(f"{part:.3f} {of}" for part, of in found)

    title, both = f"{title}: fair GPU time that", (slurm, *drawn)
    theirs, *ours = ((one.whole, f"({one.gpu_s / DAY_S:.0f} GPU days)") for one in both)
    note = f"Slurm {named([theirs])}; draws {named(ours)}"
    yield Row(f"{title} accounts lack", float(np.mean([part for part, _ in ours])), slurm.whole, note)
    theirs, *ours = (one.worst for one in both)
    note = f"Slurm {named([theirs])}; draws {named(ours)}"
    yield Row(f"{title} the worst account lacks", float(np.mean([part for part, _ in ours])), theirs[0], note)
    more = [one.beyond(slurm) for one in drawn]
    most = float(np.mean([part for part, _ in more]))
    yield Row(f"{title} one account lacks more than under Slurm", most, None, f"draws {named(more)}")


def _ideal_rows(table: Table, slurm: Outcome, ours: Outcome) -> Iterator[Row]:
    las, easy = table.runs.of([Play(table.sample, scheduler="las"), Play(table.sample, scheduler="easy")])
    yield Row("EASY, to Slurm", ratio(easy.jct_s, slurm.jct_s))
    yield Row("ideal LAS, to Slurm", ratio(las.jct_s, slurm.jct_s))
    yield Row("100% can move: to the ideal LAS", ratio(ours.jct_s, las.jct_s), 1.12)
    yield Row(
        "100% can move: p99, to the larger of Slurm's and the ideal's",
        p99(ours.jct_s) / max(p99(slurm.jct_s), p99(las.jct_s)),
        1.10,
    )


def opted_in_rows(table: Table) -> Iterator[Row]:
    """Yield the figures where 30 % of the jobs opted in, all of which can move."""
    slurm = table.slurm()
    drawn = table.drawn(0.3, opted_in="movable")
    ours = [ratio(run.jct_s, slurm.jct_s, keeps) for keeps, run in drawn]
    others = [ratio(run.jct_s, slurm.jct_s, ~keeps) for keeps, run in drawn]
    yield mean_row("30% opted in, all can move: these", ours, 0.95)
    yield mean_row("30% opted in, all can move: the others", others, 1.0)


def move_rows(table: Table) -> Iterator[Row]:
    """Yield the figures of moves that take longer, where all jobs can move."""
    slurm, jobs = table.slurm(), population(table.sample, "plain").jobs
    times = (MOVE_S, 300.0) if table.sample == "large" else (MOVE_S, 300.0, 900.0)
    base, *runs = (table.drawn(1.0, move_s=move_s)[0][1] for move_s in times)
    gpus = np.array([job.gpus for job in jobs])
    served = sum(job.gpus * job.work_s for job in jobs)
    for move_s, limit, run in zip(times[1:], (1.03, 1.08), runs, strict=False):
        title = f"moves of {move_s:.0f} s, 100% can move"
        yield Row(f"{title}: mean to that at 60 s", ratio(run.jct_s, base.jct_s), limit)
        cost = float((run.restarts * gpus).sum()) * move_s / served
        yield Row(f"{title}: part of the GPU time that moves cost", cost, 0.03)
        if table.sample == "large":
            users = worst([job.user for job in jobs], run.jct_s, slurm.jct_s, np.ones(len(jobs), bool))
            yield Row(f"{title}: mean", ratio(run.jct_s, slurm.jct_s), 1.0)
            yield Row(f"{title}: p99", p99(run.jct_s) / p99(slurm.jct_s), 1.15)
            yield Row(f"{title}: worst user", users, 1.2)


def case_rows(table: Table, case: str) -> Iterator[Row]:
    """Yield the figures of the others where 25 % can move and one user or account behaves badly."""
    slurm, jobs = table.slurm(case), population(table.sample, case).jobs
    others = np.array([job.account != NEWCOMER and LIMITED not in job.tags for job in jobs])
    drawn = table.drawn(0.25, case)
    for title, of in (("cannot", lambda keeps: ~keeps), ("can", lambda keeps: keeps)):
        values = [ratio(run.jct_s, slurm.jct_s, others & of(keeps)) for keeps, run in drawn]
        yield mean_row(f"{case}, 25% can move: others that {title}", values, 1.0)


def qos_rows(table: Table) -> Iterator[Row]:
    """Yield the tail of long jobs of a QOS that goes first, where half of all can move."""
    slurm, jobs = table.slurm("qos"), population(table.sample, "qos").jobs
    high = np.array([job.qos == HIGH_QOS and job.work_s >= LONG_QOS_S for job in jobs])
    values = [p99(run.jct_s[high]) / p99(slurm.jct_s[high]) for _, run in table.drawn(0.5, "qos")]
    yield mean_row("a high QOS for 10%, 50% can move: p99 of its jobs of 4 h and more", values, 1.0)


def lie_rows(table: Table, lie: str) -> Iterator[Row]:
    """Yield the completion of jobs that tell the truth to theirs where they lie: over 1, the lie pays."""
    title = {
        "hide": "saying 'no checkpoints'",
        "boast": "saying 'checkpoints' without any",
        "chain": "half an hour's pieces without checkpoints",
    }[lie]
    told = [(keeps, truth.jct_s) for keeps, truth in table.drawn(0.25)]
    gains, sums = [], []
    for draw, ((keeps, truth_s), (_, run)) in enumerate(zip(told, table.drawn(0.25, lie=lie), strict=True), 1):
        who = liars(keeps, Play(table.sample, lie=lie, draw=draw))
        gains.append(ratio(truth_s, run.jct_s, who))
        sums.append((truth_s[who].sum(), run.jct_s[who].sum()))
    true_s, lied_s = np.sum(sums, axis=0).tolist()
    yield Row(f"25% can move: the truth's completion to that of {title}", true_s / lied_s, 1.0, spread(gains))


ROWS: dict[str, Callable[[Table], Iterator[Row]]] = {
    "none": none_rows,
    "10": lambda table: share_rows(table, 0.1),
    "25": lambda table: share_rows(table, 0.25),
    "50": lambda table: share_rows(table, 0.5),
    "100": lambda table: share_rows(table, 1.0),
    "opted-in": opted_in_rows,
    "moves": move_rows,
    "flood": lambda table: case_rows(table, "flood"),
    "wide": lambda table: case_rows(table, "wide"),
    "limits": lambda table: case_rows(table, "limits"),
    "account": lambda table: case_rows(table, "account"),
    "qos": qos_rows,
    "hide": lambda table: lie_rows(table, "hide"),
    "boast": lambda table: lie_rows(table, "boast"),
    "chain": lambda table: lie_rows(table, "chain"),
}


# --- Output --------------------------------------------------------------------------------------------------------


def named(text: str, known: Sequence[str]) -> list[str]:
    """Return the known names that a list of patterns names, in the list's order; raise ArgumentTypeError for none."""
    found = [name for pattern in text.split(",") for name in known if fnmatch(name, pattern)]
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(found))


def main() -> int:
    """Run the samples and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=lambda text: named(text, list(SAMPLES)), default=list(SAMPLES), metavar="NAME,…",
        help=f"of {', '.join(SAMPLES)}; * stands for any part",
    )  # fmt: skip
    parser.add_argument(
        "--rows", type=lambda text: named(text, list(ROWS)), default=list(ROWS), metavar="NAME,…",
        help=f"of {', '.join(ROWS)}",
    )  # fmt: skip
    parser.add_argument("--draws", type=int, default=5, help="draws of the jobs that can move")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the runs' times there; none is run again")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
    runs, found, missed = Runs(options.jobs, options.keep), [], 0
    for sample in options.samples:
        table = Table(sample, options.draws, runs)
        jobs = population(sample, "plain").jobs
        slurm = table.slurm()
        print(f"\n{sample}: {len(jobs)} jobs; Slurm's mean {slurm.jct_s.mean() / HOUR_S:.2f} h", flush=True)
        for name in options.rows:
            for row in ROWS[name](table):
                goal = "" if row.limit is None else f"goal {row.limit:.3f} {'hit' if row.ok else 'MISSED'}"
                print(f"  {row.name:70s} {row.figure:8.3f}  {goal:19s} {row.note}".rstrip(), flush=True)
                found.append({"sample": sample, **asdict(row), "ok": row.ok})
                missed += not row.ok
            if options.out:
                options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{missed} of {sum(row['limit'] is not None for row in found)} goals missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
