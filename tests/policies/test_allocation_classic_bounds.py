"""The benchmark's bound for jobs of several GPUs, compared with every placement there is on two small nodes."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.allocation.ilp import Pool, points
from cadenza.policies.allocation.problem import Server
from cadenza.policies.core.model import Job, JobKey
from cadenza.policies.core.profile import Profile

NODE = Server("n", 2, 6, 125 * 1024)
POOL = Pool("", 2, 6.0, 125.0)
HUNGRY = Profile("hungry", 1.0, (1.0, 3.0, 5.0), (20.83, 62.5), ((0.1, 0.4), (0.3, 1.0), (0.3, 1.8)))
SPARSE = Profile("sparse", 1.0, (1.0, 3.0), (20.83, 62.5), ((1.0, 1.0), (1.0, 1.0)))
ROOMY = Profile(
    "roomy", 1.0, (1.0, 2.0, 3.0), (20.83, 62.5, 104.16), ((0.1, 0.5, 0.6), (0.2, 0.8, 1.5), (0.3, 1.0, 1.6))
)


@pytest.fixture(scope="module")
def bounds():
    """The benchmark's module, which is not installed."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "papers" / "bounds.py"
    spec = spec_from_file_location("bounds", path)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def job(number: int, profile: Profile | None, gpus: int) -> Job:
    return Job(JobKey(number, 0), "u", "a", "p", "q", "PENDING", gpus, 0, 0, 1, 0.0, profile=profile)


def best_by_trying_all(jobs: list[Job], *, weighted: bool) -> float:
    """The most total throughput on two nodes; a job of four GPUs is on both, in halves with the same point."""
    best = 0.0
    options = [
        [(choice, nodes) for choice in good(one.profile) for nodes in (((0, 1),) if one.gpus > 2 else ((0,), (1,)))]
        for one in jobs
    ]
    for picks in product(*options):
        used = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
        for one, (choice, nodes) in zip(jobs, picks, strict=True):
            for at in nodes:
                gpus = one.gpus // len(nodes)
                used[at] = [a + b * gpus for a, b in zip(used[at], (1, choice.cpus, choice.memory_gb), strict=True)]
        if all(gpus <= 2 and cpus <= 6 and memory <= 125 + 1e-9 for gpus, cpus, memory in used):
            speeds = [
                choice.speed * (one.gpus if weighted else 1) for one, (choice, _) in zip(jobs, picks, strict=True)
            ]
            best = max(best, sum(speeds))
    return best


def good(profile: Profile | None):
    some = points(profile, POOL)
    fair = next(choice.speed for choice in some if choice.fair)
    return [choice for choice in some if choice.speed >= fair]


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.sampled_from([(1, 1, 1, 1), (2, 1, 1), (2, 2), (4,), (2, 1), (1, 1, 1)]),
    profiles=st.lists(st.sampled_from((HUNGRY, SPARSE, ROOMY, None)), min_size=4, max_size=4),
    weighted=st.booleans(),
)
def test_the_bound_holds_and_is_near(bounds, sizes, profiles, weighted):
    jobs = [job(number, profile, gpus) for number, (gpus, profile) in enumerate(zip(sizes, profiles, strict=False))]
    best = best_by_trying_all(jobs, weighted=weighted)
    found = bounds.node_bound(2, NODE, jobs, weighted=weighted)
    assert best <= found.bound + 1e-6
    assert found.bound <= found.master + 1e-4 * found.master
    assert found.bound <= 1.3 * best


def test_a_bound_that_is_stopped_early_still_holds(bounds, monkeypatch):
    jobs = [job(number, profile, 1) for number, profile in enumerate((HUNGRY, HUNGRY, SPARSE, ROOMY))]
    whole = bounds.node_bound(2, NODE, jobs)
    monkeypatch.setattr(bounds, "MOST_ROUNDS", 2)
    assert bounds.node_bound(2, NODE, jobs).bound >= whole.bound - 1e-9
    assert whole.bound == pytest.approx(best_by_trying_all(jobs, weighted=False), rel=0.1)
