"""Invariants of the classic allocations on random clusters and queues."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import KINDS, cases

from cadenza.policies.allocation.demand import promises
from cadenza.policies.allocation.drf import drf
from cadenza.policies.allocation.greedy import greedy
from cadenza.policies.allocation.ilp import ilp1
from cadenza.policies.allocation.opt import opt
from cadenza.policies.allocation.problem import Case, Plan, Server, placement_speed, proportional_share, share_speed
from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.allocation.tetris import tetris
from cadenza.policies.allocation.tune import tune
from cadenza.policies.as_published.tetris_coded import tetris_coded
from cadenza.policies.as_published.tune_coded import tune_coded

ALL = [proportional, greedy, tune, tune_coded, opt, drf, tetris, tetris_coded]
FAST = settings(max_examples=10, deadline=None)
EPSILON = 1e-9


def check_books(case: Case, plan: Plan) -> None:
    """No server gives more than it has; a job has all its GPUs, one share a node in order of names, or none."""
    servers = {server.name: server for server in case.servers}
    jobs = {job.key: job for job in case.jobs}
    used = {name: [0, 0, 0] for name in servers}
    for key, placement in plan.placements.items():
        names = [share.node for share in placement]
        assert names == sorted(set(names))
        assert sum(share.gpus for share in placement) == jobs[key].gpus
        for share in placement:
            assert share.gpus > 0
            for kind in range(3):
                used[share.node][kind] += share[1 + kind]
    for name, taken in used.items():
        assert all(some <= most for some, most in zip(taken, servers[name][1:4], strict=True)), (name, taken)
    assert set(plan.reasons) <= set(jobs)


def fair_speed(case: Case, job, placement) -> float:
    """A job's throughput with the proportional shares of the same GPUs."""
    servers = {server.name: server for server in case.servers}
    return min(
        share_speed(job.profile, proportional_share(servers[share.node], share.gpus), servers[share.node].gpu_type)
        for share in placement
    )


@pytest.mark.parametrize("allocate", ALL)
@FAST
@given(case=cases(gpu_types=("", "v100")))
def test_the_books_balance(allocate, case):
    plan = allocate(case)
    check_books(case, plan)
    assert allocate(case).placements == plan.placements


@pytest.mark.parametrize("allocate", [proportional, tune, tune_coded, opt])
@FAST
@given(case=cases(n=12))
def test_every_runnable_job_and_no_other_runs(allocate, case):
    assert set(allocate(case).placements) == {job.key for job in case.jobs[: case.runnable]}


@pytest.mark.parametrize("allocate", [proportional, tune, opt])
@FAST
@given(case=cases(n=12, gpu_types=("v100", "a100")), margin=st.sampled_from((0.0, 0.02, 0.1)))
def test_nobody_falls_below_the_proportional_throughput(allocate, case, margin):
    case = replace(case, margin=margin)
    types = {server.name: server.gpu_type for server in case.servers}
    servers = {server.name: server for server in case.servers}
    plan = allocate(case)
    for job in case.jobs[: case.runnable]:
        placement = plan.placements[job.key]
        assert placement_speed(job.profile, placement, types) >= fair_speed(case, job, placement) - EPSILON
        for share in placement:
            server = servers[share.node]
            assert share == proportional_share(server, share.gpus) or promises(
                job.profile, server, share.gpus, share[2:], margin
            )


@FAST
@given(case=cases(n=12), rng=st.randoms(use_true_random=False))
def test_tune_does_not_depend_on_the_order_of_the_runnable_jobs(case, rng):
    shuffled = list(case.jobs[: case.runnable])
    rng.shuffle(shuffled)
    other = replace(case, jobs=(*shuffled, *case.jobs[case.runnable :]))
    assert tune(case).placements == tune(other).placements


@FAST
@given(case=cases(n=12), weighted=st.booleans(), copies=st.integers(1, 3))
def test_no_plan_beats_the_bound(case, weighted, copies):
    alike = tuple(Server(f"n{number}", 8, 24, 512000) for number in range(copies))
    fits = [job for job in case.jobs if job.gpus <= 8 * copies]
    jobs = []
    for job in fits:
        if sum(one.gpus for one in jobs) + job.gpus <= 8 * copies:
            jobs.append(replace(job, placement=()))
    case = replace(case, servers=alike, jobs=tuple(jobs), runnable=len(jobs))
    weights = {job.key: float(job.gpus) if weighted else 1.0 for job in jobs}
    bound = ilp1(case, weights).bound
    assert ilp1(case, weights, relaxed=True).bound >= bound - 1e-6 * max(bound, 1)
    for allocate in (proportional, tune, opt):
        plan = allocate(case)
        types = dict.fromkeys((server.name for server in alike), "")
        total = sum(weights[job.key] * placement_speed(job.profile, plan.placements[job.key], types) for job in jobs)
        assert total <= bound * (1 + 1e-6) + 1e-6


@FAST
@given(case=cases(n=12))
def test_greedy_gives_the_best_case_or_nothing(case):
    plan = greedy(case)
    alone = {job.key: greedy(replace(case, jobs=(job,), runnable=1)).placements.get(job.key) for job in case.jobs}
    for key, placement in plan.placements.items():
        assert alone[key] is not None
        if len(placement) == len(alone[key]) == 1 and len({server[1:] for server in case.servers}) == 1:
            assert placement[0][1:] == alone[key][0][1:]


def test_the_kinds_include_uneven_ones():
    assert any(cpus % gpus for gpus, cpus, _ in KINDS)


@pytest.mark.parametrize("allocate", ALL)
@FAST
@given(case=cases(n=12))
def test_only_the_values_of_profiles_count(allocate, case):
    """A replay reads every job's profile anew, so that equal ones are no longer the same."""
    anew = tuple(replace(job, profile=job.profile and replace(job.profile)) for job in case.jobs)
    assert allocate(replace(case, jobs=anew)) == allocate(case)
