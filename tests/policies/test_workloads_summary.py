"""The figures of a result, intervals over seeds, saved files, load sweeps and capacity."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from statistics import fmean, quantiles

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.figures import mean_and_half, mean_over, over_seeds, quantile, student, summarize
from cadenza.policies.simulator.load_sweep import (
    LoadRow,
    SweepPoint,
    backlogged,
    capacity,
    highest_stable,
    load_rows,
    read_loads,
    stable,
    too_short,
)
from cadenza.policies.simulator.result_file import Saved, decode, encode, save_run, thin
from cadenza.policies.simulator.run_values import Counts, JobResult, Result, Sample, Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.workloads.catalogue import parse_workload


def ended(number: int, submit_s: float, finish_s: float | None, hundred_s: float | None = None) -> JobResult:
    return JobResult(number, submit_s, submit_s, finish_s, 1, "m", "u", 10.0, 10.0, hundred_s)


SAMPLES = (Sample(0, 2, 4, 2, 0, 1.0), Sample(3600, 4, 8, 4, 6, 3.0), Sample(7200, 0, 0, 0, 0, 0.0))
RESULT = Result(
    jobs=(ended(1, 0, 3600, 60), ended(2, 0, 7200, 120), ended(3, 3600, None, None), ended(4, 99999, None)),
    samples=SAMPLES,
    counts=Counts(rounds=9, decided=3, migrations=2),
    gpus=4,
    cpus=16,
    end_s=10800.0,
    decision_s=(0.001, 0.003),
)


def test_the_figures() -> None:
    found = summarize(RESULT)
    assert (found.jobs, found.unfinished) == (2, 1)
    assert (found.avg_jct_h, found.p50_jct_h, found.makespan_h) == (1.5, 1.5, 2.0)
    assert found.p99_jct_h == pytest.approx(1.99)
    assert (found.gpu_utilization, found.gpu_busy, found.cpu_utilization) == (0.5, pytest.approx(1 / 3), 0.25)
    assert (found.time_to_100_iterations_s, found.censored_100_iterations) == (120, 1)
    assert found.mean_time_to_100_iterations_s == fmean([60, 120, 7200])
    assert (found.decision_ms.p50, found.decision_ms.max) == (2.0, 3.0)
    assert (found.rounds, found.decisions, found.migrations) == (9, 3, 2)


def test_a_window_counts_only_its_jobs_and_nothing_is_divided_by_zero() -> None:
    assert summarize(RESULT, (1, 2)).avg_jct_h == 2.0
    none = summarize(Result((), (), Counts(), 0, 0, 0.0))
    assert (none.avg_jct_h, none.makespan_h, none.gpu_utilization, none.decision_ms.p50) == (None, None, 0.0, None)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=40).map(sorted))
def test_quantiles_are_those_of_numpy_and_of_synergys_simulator(values: list[float]) -> None:
    assert quantile(values, 0.25) == pytest.approx(quantiles(values, n=4, method="inclusive")[0])
    assert quantile(values, 0.99, synergy=True) == values[int(0.99 * len(values))]
    assert (quantile(values, 0.0), quantile(values, 1.0)) == (values[0], values[-1])


def test_means_over_time_follow_the_steps() -> None:
    assert mean_over(SAMPLES, lambda sample: sample.gpus_held, 1800, 5400) == 3.0
    assert mean_over(SAMPLES, lambda sample: sample.waiting, 7200, 9000) == 0.0
    assert mean_over(SAMPLES, lambda sample: sample.waiting, 5, 5) == 0.0
    assert mean_over((), lambda sample: sample.waiting, 0, 5) == 0.0


def test_intervals_over_seeds() -> None:
    assert mean_and_half([3.0]) == (3.0, None)
    mean, half = mean_and_half([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / 3**0.5))
    assert student(30) > student(31) > student(10_000) > 1.9599
    one, other = summarize(RESULT), summarize(replace(RESULT, jobs=RESULT.jobs[:1]))
    both = over_seeds([one, other])
    assert both["avg_jct_h"] == 1.25
    assert both["interval95"]["avg_jct_h"] == pytest.approx(12.706 * 0.25)
    assert both["decision_ms"]["max"] == 3.0
    assert "interval95" not in over_seeds([one])


# --- Saved -----------------------------------------------------------------------------------------------


def test_what_is_saved_is_read_back() -> None:
    saved = Saved("fifo", ("--nodes", "1x4:16:64"), 4, 16, (save_run(RESULT, 7, {"jobs": 2}),), classes={"m": "image"})
    again = decode(encode(saved), "s.json")
    assert again == saved
    assert again.runs[0].jobs == RESULT.jobs[:3]
    assert again.runs[0].samples == SAMPLES


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(1, 100), st.integers(0, 8)), min_size=1, max_size=60), st.integers(1, 12))
def test_thinning_keeps_the_mean(steps: list[tuple[float, int]], most: int) -> None:
    samples, time_s = [], 0.0
    for length, held in steps:
        samples.append(Sample(time_s, held, held, held, held, float(held)))
        time_s += length
    rows = thin(samples, time_s, most)
    assert len(rows) <= most
    assert mean_over(rows, lambda sample: sample.busy, 0, time_s) == pytest.approx(
        mean_over(samples, lambda sample: sample.busy, 0, time_s)
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "s.json: not JSON"),
        (b"\xff", "s.json: not JSON"),
        (b"{}", "s.json: top level: object missing required field"),
        (b'{"label":"a","arguments":[],"gpus":1,"cpus":1,"schema":"x"}', "s.json: schema: invalid enum value"),
    ],
)
def test_a_wrong_file_is_named(data: bytes, said: str) -> None:
    with pytest.raises(InputError, match="^" + said):
        decode(data, "s.json")


# --- Sweeps ----------------------------------------------------------------------------------------------


def test_loads() -> None:
    assert read_loads("4:5.5:0.5") == (4.0, 4.5, 5.0, 5.5)
    assert read_loads("0.1:0.3:0.1") == (0.1, 0.2, 0.3)
    for text in ("4:5", "5:4:1", "1:2:0", "1:1000:0.1", "a:b:c"):
        with pytest.raises(InputError, match=r"^load sweep"):
            read_loads(text)


def test_rows_and_the_highest_stable_load() -> None:
    points = [SweepPoint(load, seed, load + seed, 0.5, load < 6) for load in (6.0, 5.0, 4.0) for seed in (1, 2)]
    rows = load_rows(points)
    assert [row.load for row in rows] == [4, 5, 6]
    assert (rows[0].mean_jct_h, rows[0].interval95) == (5.5, pytest.approx(12.706 * 0.5))
    assert highest_stable(rows) == 5
    assert highest_stable([LoadRow(4, 1, None, 1, stable=False), LoadRow(5, 1, None, 1, stable=True)]) is None


def queue(*lengths: int) -> Result:
    samples = tuple(Sample(100.0 * place, 0, 0, 0, length) for place, length in enumerate(lengths))
    return replace(RESULT, samples=samples, end_s=100.0 * len(lengths))


def test_a_load_is_stable_while_the_queue_does_not_grow() -> None:
    jobs = [TraceJob(number, 10.0 * number, 1, 1.0) for number in range(100)]
    assert stable(jobs, queue(*[5] * 10))
    assert stable(jobs, queue(0, 9, 9, 9, 9, 9, 9, 9, 9, 9))
    assert not stable(jobs, queue(*range(0, 100, 10)))


def test_arrivals_that_end_before_the_cluster_fills_tell_nothing() -> None:
    assert too_short([TraceJob(0, 0.0, 1, 100.0), TraceJob(1, 900.0, 1, 100.0)])
    assert not too_short([TraceJob(0, 0.0, 1, 100.0), TraceJob(1, 1000.0, 1, 100.0)])


# --- Capacity --------------------------------------------------------------------------------------------

NODES = read_cluster("2x8:24:500")
PROPORTIONAL = build("fifo", "proportional", "none", PolicySettings(partitions=frozenset({PARTITION})))


def test_the_proportional_share_gets_nominal_capacity() -> None:
    drawn = parse_workload("synergy:jobs=900").generate(Random(1))  # noqa: S311
    jobs = [replace(job, work_s=job.work_s / 10) for job in drawn]
    found = capacity(jobs, 16, lambda queued: simulate(queued, NODES, PROPORTIONAL, Setup(round_s=60)))
    assert found.gpu_hours_per_hour == pytest.approx(16, rel=0.08)
    assert found.jobs_per_hour == pytest.approx(found.gpu_hours_per_hour / (fmean(j.work_s for j in jobs) / 3600))
    assert found.moves_per_job_hour == 0.0


def test_the_backlog_depends_on_the_jobs_alone() -> None:
    jobs = [TraceJob(number, 0.0, 2, 50.0) for number in range(40)]
    queued = backlogged(jobs, 4, pressure=2.0)
    assert [job.submit_s for job in queued[:6]] == [0.0, 0.0, 0.0, 0.0, 0.0, 13.0]
    assert queued[-1].submit_s == 438.0


def test_a_queue_that_runs_dry_is_no_measure() -> None:
    jobs = [TraceJob(number, 0.0, 1, 50.0) for number in range(40)]
    idle = replace(RESULT, samples=(Sample(0.0, 0, 0, 0, 0),), end_s=1e6)
    with pytest.raises(InputError, match="the queue must never be empty"):
        capacity(jobs, 4, lambda _: idle)
    with pytest.raises(InputError, match="too few"):
        capacity(jobs[:3], 4, lambda _: idle)
