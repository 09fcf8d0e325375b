"""Preferred jobs among those that share GPUs, and the gain and limits of turns by the ordering."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns_world import gpus, key

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import Turns
from cadenza.policies.sharing.turns.contender import Contender, preferred
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.simulation import simulate

pytestmark = pytest.mark.slow  # whole simulations

SLICE_S = 60.0


def job(number: int, *indices: int, state: str = "yielded", **facts) -> Contender:
    return Contender(key=key(number), gpus=gpus(*indices), state=state, **facts)


def first(*contenders: Contender, ranks: dict[int, int] | None = None) -> set[int]:
    """Numbers of the preferred jobs; by default numbers are ranks."""
    places = {c.key.id: c.key.id for c in contenders} if ranks is None else ranks
    return {found.id for found in preferred(contenders, {key(n): rank for n, rank in places.items()})}


def test_the_first_on_all_its_gpus_is_preferred():
    assert first(job(1, 0), job(2, 0)) == {1}
    assert first(job(1, 0), job(2, 0, 1), job(3, 1)) == {1}
    assert first(job(1, 0), job(2, 1), job(3, 0, 1)) == {1, 2}


def test_a_job_that_has_not_had_its_first_turn_is_preferred_too():
    assert first(job(1, 0, state="held"), job(2, 0), job(3, 0, state="waiting")) == {1, 3}


def test_who_may_not_run_or_is_not_ranked_is_in_no_jobs_way():
    assert first(job(1, 0, eligible=False), job(2, 0)) == {2}
    assert first(job(1, 0), job(2, 0), ranks={2: 0}) == {2}
    assert first(job(1, 0), job(2, 0), ranks={}) == set()


def test_priorities_are_not_mixed():
    assert first(job(1, 0), job(2, 0, priority=1), job(3, 0)) == {1, 2}


@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_a_job_is_preferred_and_never_two_that_meet(gangs, random):
    ranks = list(range(len(gangs)))
    random.shuffle(ranks)
    jobs = [job(number, *gang) for number, gang in enumerate(gangs)]
    found = first(*jobs, ranks=dict(enumerate(ranks)))
    assert ranks.index(0) in found
    held = [gpu for each in jobs if each.key.id in found for gpu in each.gpus]
    assert len(held) == len(set(held))


# --- In the simulator ------------------------------------------------------------------------------------


def simulated(turns: Turns, order: str, *work_s: float) -> Result:
    """Jobs that come a slice apart and want the same GPU; an iteration takes 0.1 s, switches next to nothing."""
    jobs = [
        TraceJob(id=n, submit_s=n * SLICE_S, gpus=1, work_s=work, iterations=round(10 * work), memory_gb_per_gpu=1.0)
        for n, work in enumerate(work_s)
    ]
    settings = PolicySettings(partitions=frozenset({PARTITION}))
    settings = replace(settings, sharing=replace(settings.sharing, turns=turns))
    policy = build(order, "proportional", "timeslice", settings)
    setup = Setup(round_s=10.0, lanes=2, rounds_on_events=True, costs=SimCosts())
    return simulate(jobs, read_cluster("1x1:4:64", 2), policy, setup)


@pytest.mark.parametrize(("order", "soonest"), [("srtf", 1), ("fifo", 0)])
def test_the_first_in_the_order_ends_nearly_as_soon_as_alone(order, soonest):
    """Job 0 is the longer one, and came first. Who is behind has a ninth, and ends no later than with fair turns."""
    alone_s = (7200.0, 3600.0)
    fair, by_order = ([one.jct_s for one in simulated(turns, order, *alone_s).jobs] for turns in ("fair", "order"))
    assert fair[soonest] > 1.4 * alone_s[soonest]
    assert by_order[soonest] < 1.2 * alone_s[soonest]
    assert by_order[1 - soonest] <= sum(alone_s) + SLICE_S


@pytest.mark.parametrize("turns", ["fair", "order"])
def test_a_newcomer_has_its_first_turn_as_soon_as_ever(turns):
    result = simulated(turns, "fifo", 7200.0, 7200.0)
    assert result.jobs[1].to_100_iterations_s <= 2 * SLICE_S
