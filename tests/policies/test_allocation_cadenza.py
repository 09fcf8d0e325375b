"""Cadenza's own allocation: what every plan keeps, when jobs stay, and how good plans are."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import GPU_TYPES, NOW, cases

from cadenza.policies.allocation.cadenza import allocate as ours
from cadenza.policies.allocation.cadenza.allocate import cadenza
from cadenza.policies.allocation.problem import Case, Costs, Plan, Server, placement_speed, proportional_share
from cadenza.policies.core.model import Job, JobKey, Placement, Progress, Share
from cadenza.policies.core.profile import MB_PER_GB, Profile

CPUS = (1.0, 2.0, 3.0, 6.0, 12.0)
MEMORY = (20.0, 62.5, 125.0)
EPSILON = 1e-9


def profile(*speeds: float) -> Profile:
    """A profile whose speed depends on the CPUs alone: 1, 2, 3, 6 and 12 a GPU."""
    return Profile("made", 1.0, CPUS, MEMORY, tuple((speed,) * len(MEMORY) for speed in speeds))


FLAT = profile(1, 1, 1, 1, 1)
STEEP = profile(0.3, 0.7, 1, 2, 3)
MIDDLE = profile(0.4, 0.7, 1, 1.5, 1.5)


def job(number: int, made: Profile | None = FLAT, gpus: int = 1, placement: Placement = ()) -> Job:
    return Job(
        JobKey(number, 0),
        "ann",
        "",
        "gpu",
        "",
        "RUNNING" if placement else "PENDING",
        gpus,
        gpus,
        1024,
        1,
        0.0,
        profile=made,
        placement=placement,
        progress=Progress(0.0, running=bool(placement)),
    )


def servers(count: int, gpus: int = 8, cpus: int = 24, gb: int = 500, gpu_type: str = "") -> tuple[Server, ...]:
    return tuple(Server(f"{gpu_type}n{number}", gpus, cpus, gb * MB_PER_GB, gpu_type) for number in range(count))


def applied(case: Case, plan: Plan) -> Case:
    """The case once its plan has been carried out."""
    return replace(case, jobs=tuple(replace(one, placement=plan.placements.get(one.key, ())) for one in case.jobs))


def speeds(case: Case, plan: Plan) -> dict[int, float]:
    types = {server.name: server.gpu_type for server in case.servers}
    return {one.key.id: placement_speed(one.profile, plan.placements[one.key], types) for one in case.jobs}


def moved(case: Case, plan: Plan) -> set[int]:
    """The running jobs that change nodes."""
    return {
        one.key.id
        for one in case.jobs[: case.runnable]
        if one.placement and [s[:2] for s in one.placement] != [s[:2] for s in plan.placements[one.key]]
    }


def check(case: Case, plan: Plan) -> None:
    """Everything that holds for every plan."""
    chosen = case.jobs[: case.runnable]
    assert set(plan.placements) == {one.key for one in chosen}
    nodes = {server.name: server for server in case.servers}
    types = {server.name: server.gpu_type for server in case.servers}
    used: Counter[tuple[str, int]] = Counter()
    for one in chosen:
        placement = plan.placements[one.key]
        assert sum(share.gpus for share in placement) == one.gpus
        assert [share.node for share in placement] == sorted({share.node for share in placement})
        fair = tuple(proportional_share(nodes[share.node], share.gpus) for share in placement)
        least = (1 + case.margin) * placement_speed(one.profile, fair, types) - EPSILON
        if one.profile is None:
            assert placement == fair
        assert placement_speed(one.profile, placement, types) >= least or (len(fair) > 1 or placement == fair)
        assert placement_speed(one.profile, placement, types) >= least / (1 + case.margin) - EPSILON
        for share in placement:
            used.update({(share.node, 1): share.gpus, (share.node, 2): share.cpus, (share.node, 3): share.memory_mb})
    assert all(taken <= nodes[name][resource] for (name, resource), taken in used.items())


# --- what every plan keeps -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cases(10, max_nodes=3), st.sampled_from((0.0, 0.05)), st.booleans(), st.sampled_from((0.0, 100.0)))
def test_every_plan_keeps_what_is_promised(case, margin, weighted, tune_s):
    case = replace(case, margin=margin, weighted=weighted, costs=Costs(tune_s=tune_s))
    check(case, cadenza(case))


@settings(max_examples=40, deadline=None)
@given(cases(10, gpu_types=GPU_TYPES), st.data())
def test_gpu_types_are_used_where_possible(case, data):
    wish = st.sampled_from((*GPU_TYPES, "none"))
    wanted = {one.key: data.draw(wish) for one in case.jobs[: case.runnable] if data.draw(st.booleans())}
    case = replace(case, gpu_type=wanted)
    check(case, cadenza(case))


@settings(max_examples=30, deadline=None)
@given(cases(10), st.randoms(use_true_random=False))
def test_order_of_servers_and_chosen_jobs_changes_nothing(case, rng):
    chosen = list(case.jobs[: case.runnable])
    nodes = list(case.servers)
    rng.shuffle(chosen)
    rng.shuffle(nodes)
    other = replace(case, servers=tuple(nodes), jobs=(*chosen, *case.jobs[case.runnable :]))
    assert cadenza(other) == cadenza(case)
    assert cadenza(case) == cadenza(case)


@settings(max_examples=40, deadline=None)
@given(cases(8, gpus=(1, 1, 2)))
def test_a_plan_that_was_carried_out_is_kept(case):
    first = cadenza(case)
    again = cadenza(applied(case, first))
    assert not moved(applied(case, first), again)


def test_no_job_and_no_server():
    assert cadenza(Case(0.0, (), (), 0)) == Plan({})
    assert cadenza(Case(0.0, servers(1), (job(1),), 0)) == Plan({})


# --- quality -------------------------------------------------------------------------------------------


def test_a_donor_gives_what_a_hungry_job_can_use():
    case = Case(0.0, servers(1, gpus=2, cpus=6, gb=125), (job(1, FLAT), job(2, STEEP)), 2)
    plan = cadenza(case)
    assert plan.placements[JobKey(1, 0)] == (Share("n0", 1, 1, 20 * MB_PER_GB),)
    assert plan.placements[JobKey(2, 0)] == (Share("n0", 1, 3, 20 * MB_PER_GB),)
    assert cadenza(replace(case, servers=servers(1, gpus=2, cpus=7, gb=125))).placements[JobKey(2, 0)][0].cpus == 6


def test_donors_and_hungry_jobs_meet():
    made = [FLAT] * 8 + [STEEP] * 2 + [MIDDLE] * 6
    case = Case(0.0, servers(2), tuple(job(number, one) for number, one in enumerate(made)), 16)
    assert sum(speeds(case, cadenza(case)).values()) >= brute_force(made, 2) - EPSILON


def brute_force(made: list[Profile], nodes: int) -> float:
    """The bound of one large machine, by dynamic programming over its CPUs."""
    best = np.zeros(24 * nodes + 1)
    for one in made:
        more = np.full_like(best, -np.inf)
        for cpus, row in zip(CPUS, one.throughput, strict=True):
            if row[0] >= 1:
                more[int(cpus) :] = np.maximum(more[int(cpus) :], best[: len(best) - int(cpus)] + row[0])
        best = more
    return float(best[-1])


@pytest.mark.parametrize("split", [(2, 7, 1), (1, 1, 1)])
def test_from_scratch_it_is_close_to_the_bound_of_one_machine(split):
    for seed in range(3):
        rng = random.Random(seed)  # noqa: S311 (a draw of models)
        made = rng.choices([STEEP, FLAT, MIDDLE], split, k=64)
        case = Case(0.0, servers(8), tuple(job(number, one) for number, one in enumerate(made)), 64)
        total = sum(speeds(case, cadenza(case)).values())
        assert total >= 0.985 * brute_force(made, 8)


def test_equal_gangs_and_small_jobs_share_nodes():
    made = [job(number, FLAT, 4) for number in range(2)] + [job(9 + number, STEEP) for number in range(8)]
    case = Case(0.0, servers(2), tuple(made), 10)
    plan = cadenza(case)
    assert len({plan.placements[JobKey(number, 0)][0].node for number in range(2)}) == 2
    assert sum(speeds(case, plan).values()) == pytest.approx(2 * (1 + 2 + 2 + 1 + 1))


def test_weights_count_gpus():
    jobs = (job(1, STEEP, 4), *(job(2 + number, STEEP) for number in range(4)))
    case = Case(0.0, servers(1, cpus=28), jobs, 5)
    assert speeds(case, cadenza(case))[1] == 1.0
    many = Case(0.0, servers(1, cpus=36), jobs, 5, weighted=True)
    assert speeds(many, cadenza(many))[1] == 2.0


# --- several GPUs --------------------------------------------------------------------------------------


def test_a_job_larger_than_a_node_runs_at_its_slowest_node():
    case = Case(0.0, servers(3), (job(1, STEEP, 16), *(job(2 + number, FLAT) for number in range(8))), 9)
    plan = cadenza(case)
    assert [share.gpus for share in plan.placements[JobKey(1, 0)]] == [8, 8]
    assert speeds(case, plan)[1] == 1.0
    assert "2 nodes" in plan.reasons[JobKey(1, 0)]


def test_parts_of_a_spanning_job_take_what_their_common_speed_needs():
    case = Case(0.0, servers(2), (job(1, STEEP, 10), *(job(2 + number, FLAT) for number in range(6))), 7)
    plan = cadenza(case)
    parts = plan.placements[JobKey(1, 0)]
    assert [share.gpus for share in parts] == [8, 2]
    assert [share.cpus for share in parts] == [24, 6]


def _scattered(costs: Costs) -> Case:
    """Four nodes with two free GPUs each and a newcomer with four."""
    running = [
        job(8 * node + number, FLAT, placement=(Share(f"n{node}", 1, 1, 20 * MB_PER_GB),))
        for node, number in product(range(4), range(6))
    ]
    return Case(NOW, servers(4), (*running, job(99, FLAT, 4)), 25, costs=costs)


def test_small_jobs_make_room_for_a_gang_when_that_pays():
    case = _scattered(Costs(moves_per_job_hour=10.0))
    plan = cadenza(case)
    check(case, plan)
    assert len(plan.placements[JobKey(99, 0)]) == 1
    assert len(moved(case, plan)) == 2


@pytest.mark.parametrize("costs", [Costs(move_s=1000.0, moves_per_job_hour=10.0), Costs(moves_per_job_hour=0.0)])
def test_a_gang_spans_nodes_when_room_costs_too_much(costs):
    case = _scattered(costs)
    plan = cadenza(case)
    check(case, plan)
    assert len(plan.placements[JobKey(99, 0)]) == 2
    assert not moved(case, plan)


def test_a_job_on_several_nodes_is_brought_together_once_there_is_room():
    case = Case(
        NOW,
        servers(2),
        (job(1, FLAT, 4, placement=(Share("n0", 2, 2, 999), Share("n1", 2, 2, 999))),),
        1,
        costs=Costs(moves_per_job_hour=100.0),
    )
    assert len(cadenza(case).placements[JobKey(1, 0)]) == 1
    assert len(cadenza(replace(case, costs=Costs(moves_per_job_hour=0))).placements[JobKey(1, 0)]) == 2


# --- stickiness ----------------------------------------------------------------------------------------


def _lopsided(costs: Costs) -> Case:
    """Two nodes, one with the hungry jobs and one with the donors."""
    running = [
        job(8 * node + number, (STEEP, FLAT)[node], placement=(Share(f"n{node}", 1, 3, 64000),))
        for node, number in product(range(2), range(7))
    ]
    return Case(NOW, servers(2), tuple(running), 14, costs=costs)


def test_a_job_moves_when_that_gains_more_than_it_costs():
    case = _lopsided(Costs(moves_per_job_hour=100.0))
    plan = cadenza(case)
    check(case, plan)
    assert moved(case, plan)
    assert all("moves from" in plan.reasons[JobKey(number, 0)] for number in moved(case, plan))


def test_no_job_moves_for_a_gain_below_its_cost():
    case = _lopsided(Costs(move_s=3600.0, moves_per_job_hour=100.0))
    assert not moved(case, cadenza(case))


def test_no_more_jobs_move_than_are_allowed():
    costs = Costs(moves_per_job_hour=0.1)
    case = _lopsided(costs)
    rounds = [replace(case, now_s=NOW + costs.round_s * number) for number in range(120)]
    moves = sum(ours._moves(one, len(one.jobs)) for one in rounds)
    assert moves == pytest.approx(0.1 * 14 * 10, abs=2)
    assert all(len(moved(one, cadenza(one))) <= ours._moves(one, len(one.jobs)) for one in rounds[:20])


@pytest.mark.parametrize(("tune_s", "cpus"), [(0.0, 12), (1000.0, 12), (3000.0, 3)])
def test_shares_change_when_that_gains_more_than_it_costs(tune_s, cpus):
    running = job(1, STEEP, placement=(Share("n0", 1, 3, 64000),))
    case = Case(NOW, servers(1), (running,), 1, costs=Costs(horizon_s=1000.0, tune_s=tune_s))
    assert cadenza(case).placements[JobKey(1, 0)][0].cpus == cpus


def test_what_is_left_by_others_is_used_where_a_job_is():
    running = tuple(job(number, STEEP, placement=(Share(f"n{number}", 1, 3, 64000),)) for number in range(2))
    case = Case(NOW, servers(2), running, 2)
    plan = cadenza(case)
    assert not moved(case, plan)
    assert set(speeds(case, plan).values()) == {3.0}


def test_a_placement_that_no_longer_fits_is_given_up():
    gone = job(1, FLAT, placement=(Share("gone", 1, 3, 64000),))
    crowd = [job(number, FLAT, placement=(Share("n0", 1, 1, 999),)) for number in range(2, 12)]
    case = Case(NOW, servers(2), (gone, *crowd), 11)
    check(case, cadenza(case))


# --- GPU types -----------------------------------------------------------------------------------------


def test_the_ordering_chooses_the_gpu_type():
    nodes = (*servers(1, gpu_type="a100"), *servers(1, gpu_type="v100"))
    jobs = tuple(job(number, FLAT) for number in range(8))
    for gpu in ("a100", "v100"):
        case = Case(0.0, nodes, jobs, 8, gpu_type={one.key: gpu for one in jobs})
        assert {share.node for placement in cadenza(case).placements.values() for share in placement} == {f"{gpu}n0"}
    crowd = tuple(job(number, FLAT) for number in range(12))
    case = Case(0.0, nodes, crowd, 12, gpu_type={one.key: "a100" for one in crowd})
    used = Counter(placement[0].node for placement in cadenza(case).placements.values())
    assert used == {"a100n0": 8, "v100n0": 4}


def test_a_model_goes_to_the_gpus_on_which_it_gains_most():
    fast = replace(FLAT, gpu="a100", iteration_s=0.25)
    keen = replace(FLAT, siblings={"a100": fast}, gpu="v100")
    dull = replace(FLAT, gpu="v100", siblings={"a100": replace(FLAT, gpu="a100", iteration_s=0.9)})
    nodes = (*servers(1, gpu_type="a100"), *servers(1, gpu_type="v100"))
    jobs = tuple(job(number, (keen, dull)[number % 2]) for number in range(16))
    plan = cadenza(Case(0.0, nodes, jobs, 16))
    assert all((placement[0].node == "a100n0") == (key.id % 2 == 0) for key, placement in plan.placements.items())
