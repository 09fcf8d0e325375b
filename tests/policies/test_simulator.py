"""The simulator against hand-computed runs, a second-by-second oracle, and its own books."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Migrate, Place, Requeue, Resume, Yield
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import JobKey, Node
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.failures import NodeFailure
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.simulator.run_values import Result, Setup
from cadenza.policies.simulator.sim_gateway import SimGateway
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.world import World

FREE = SimCosts(restart_s=0.0, yield_s=0.0, resume_s=0.0, migrate_s=0.0, resize_s=0.0)
SETTINGS = PolicySettings(partitions=frozenset({PARTITION}))


def cluster(count: int, gpus: int = 8, cpus: int = 24, memory_mb: int = 512000) -> tuple[Node, ...]:
    names = [f"n{number}" for number in range(1, count + 1)]
    return tuple(Node(name, name, 0, cpus, memory_mb, gpus, partitions=(PARTITION,)) for name in names)


def vision() -> Profile:
    """Half as fast with one CPU, twice as fast with six, whatever its memory."""
    return Profile("vision", 1.0, (1.0, 3.0, 6.0), (20.0, 62.5), ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0)))


def donor() -> Profile:
    return Profile("donor", 1.0, (1.0, 3.0), (20.0, 62.5), ((1.0, 1.0), (1.0, 1.0)))


def run(jobs: list[TraceJob], nodes: tuple[Node, ...], order: str, allocate: str, setup: Setup) -> Result:
    return simulate(jobs, nodes, build(order, allocate, "none", SETTINGS), setup)


def finishes(result: Result) -> dict[int, float | None]:
    return {job.id: job.finish_s for job in result.jobs}


def test_jobs_wait_for_the_next_round_and_for_gpus() -> None:
    jobs = [TraceJob(1, 0.0, 8, 500.0), TraceJob(2, 10.0, 8, 100.0)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(round_s=300.0))
    assert finishes(result) == {1: 500.0, 2: 700.0}  # job 1 ends at 500, the next round is at 600


def in_turns(jobs: list[TraceJob], costs: SimCosts = FREE) -> Result:
    rules = PolicySettings(
        partitions=frozenset({PARTITION}),
        sharing=SharingSettings(enforce=True, place=True, slice_s=10.0, partitions=frozenset({PARTITION})),
    )
    setup = Setup(round_s=10.0, rounds_on_events=True, lanes=2, costs=costs)
    return simulate(jobs, read_cluster("1x8:24:500", 2), build("fifo", "proportional", "timeslice", rules), setup)


def test_jobs_share_a_host_in_lanes_if_its_memory_holds_both() -> None:
    def starts(memory_gb: float | None) -> list[float | None]:
        jobs = [TraceJob(number, 0.0, 8, 100.0, memory_gb_per_gpu=memory_gb) for number in (1, 2)]
        return [job.start_s for job in in_turns(jobs).jobs]

    assert starts(None) == [0.0, 100.0]
    assert starts(30.0) == [0.0, 10.0]
    assert starts(32.0) == [0.0, 100.0]
    assert starts(62.5) == [0.0, 100.0]
    with pytest.raises(InputError, match="job 1 asks for 63 GB for each of 8 GPUs on a node, the largest node has 500"):
        starts(63.0)


def test_a_job_is_launched_while_another_one_has_its_gpus() -> None:
    jobs = [TraceJob(number, 0.0, 8, 100.0, memory_gb_per_gpu=30.0) for number in (1, 2)]
    # No job can be asked to yield before its launch at 15 s; job 2 is launched by its turn at 20 s, and catches up.
    assert finishes(in_turns(jobs, replace(FREE, dispatch_s=15.0))) == {1: 215.0, 2: 200.0}
    # Both start up with the GPUs.
    assert finishes(in_turns(jobs, replace(FREE, start_s=5.0))) == {1: 205.0, 2: 210.0}


def live(
    jobs: list[TraceJob],
    nodes: str,
    *names: str,
    place: bool = False,
    phased: bool = True,
    failures: tuple[NodeFailure, ...] = (),
) -> Result:
    """Return a run under the conditions of a live cluster: Slurm's books, and moves that take several rounds."""
    parts = frozenset({PARTITION})
    rules = PolicySettings(
        partitions=parts,
        sharing=SharingSettings(enforce=True, place=place, slice_s=10.0, partitions=parts, floor=True),
        phased_moves=phased,
    )
    costs = replace(FREE, migrate_s=40.0, resize_s=40.0, dispatch_s=2.0)
    order, allocate, share = names
    lanes = 1 if share == "none" else 2
    setup = Setup(
        round_s=10.0,
        rounds_on_events=True,
        lanes=lanes,
        costs=costs,
        place=not phased,
        phased_moves=phased,
        failures=failures,
    )
    return simulate(jobs, read_cluster(nodes, lanes), build(order, allocate, share, rules), setup)


def small(number: int, submit_s: float, gpus: int, work_s: float, **more: int) -> TraceJob:
    return TraceJob(number, submit_s, gpus, work_s, memory_gb_per_gpu=10.0, **more)


def test_slurm_starts_jobs_on_lane_0_first_and_short_ones_past_large_ones() -> None:
    short = replace(small(4, 1.0, 2, 100.0), time_limit_s=150.0)
    jobs = [small(1, 0.0, 6, 100.0), small(2, 0.0, 8, 100.0), small(3, 0.0, 8, 100.0), short]
    result = live(jobs, "1x8:24:500", "fifo", "none", "timeslice")
    starts = {job.id: job.start_s for job in result.jobs}
    # Lane 0 has job 1 and then job 4, lane 1 has job 2, and job 3 waits for a whole lane.
    assert starts[1] == 0.0
    assert starts[4] == 30.0, "by backfill: it ends before job 1 has to"
    assert starts[2] == 11.0, "after a slice of job 1, and Slurm's look at 3 s that started nothing is no event"
    assert starts[3] is not None
    assert starts[3] > 100.0
    assert not result.unfinished


def test_without_a_policy_slurm_runs_one_job_a_gpu() -> None:
    jobs = [small(1, 0.0, 8, 100.0), small(2, 0.0, 8, 100.0)]
    result = live(jobs, "1x8:24:500", "fifo", "none", "none")
    assert finishes(result) == {1: 102.0, 2: 204.0}


def test_a_job_that_slurm_can_never_start_is_left_unfinished() -> None:
    jobs = [small(1, 0.0, 12, 100.0), small(2, 0.0, 8, 100.0)]  # six GPUs of each of two nodes, one of which has four
    result = live(jobs, "1x8:24:500,1x4:12:250", "fifo", "none", "timeslice")
    assert [key.id for key in result.unfinished] == [1]


CROWDED = [small(number, 0.1 * number, 4, 100.0 if number in (1, 3) else 1000.0) for number in range(1, 5)]
"""Jobs 1 and 3 leave n0001 idle early, while jobs 2 and 4 take turns on n0002; then one of these moves."""


@pytest.mark.parametrize("place", [False, True])
def test_a_move_over_several_rounds_costs_what_a_move_at_once_does(place: bool) -> None:
    at_once = live(CROWDED, "2x4:12:500", "fifo", "none", "gandiva", place=True, phased=False)
    in_steps = live(CROWDED, "2x4:12:500", "fifo", "none", "gandiva", place=place)
    assert at_once.counts.migrations == in_steps.counts.migrations == 1
    assert in_steps.counts.restarts == 0
    moved = [next(job for job in run.jobs if job.migrations) for run in (at_once, in_steps)]
    spent = [job.finish_s - job.submit_s for job in moved if job.finish_s is not None]
    assert spent[1] == pytest.approx(spent[0], abs=20.0)


def test_a_job_that_grows_is_requeued_with_its_checkpoint() -> None:
    jobs = [small(1, 0.0, 2, 2000.0, min_gpus=2, max_gpus=4)]
    result = live(jobs, "1x4:12:500", "fifo", "none", "gandiva")
    assert (result.counts.resizes, result.counts.restarts) == (1, 0)
    finish_s = finishes(result)[1]
    assert finish_s is not None
    assert 1000.0 < finish_s < 1400.0


@pytest.mark.parametrize("start_s", [205.0, 215.0, 245.0])
def test_a_lost_node_in_the_middle_of_a_move_loses_no_job(start_s: float) -> None:
    failures = (NodeFailure("n0001", start_s, start_s + 100.0), NodeFailure("n0002", 600.0, 700.0))
    assert not live(CROWDED, "2x4:12:500", "fifo", "none", "gandiva", failures=failures).unfinished


def test_rounds_on_events_leave_no_gap() -> None:
    jobs = [TraceJob(1, 0.0, 8, 500.0), TraceJob(2, 10.0, 8, 100.0)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(round_s=300.0, rounds_on_events=True))
    assert finishes(result) == {1: 500.0, 2: 600.0}


def test_synergy_conventions_end_jobs_with_their_round() -> None:
    jobs = [TraceJob(1, 0.0, 1, 301.0, iterations=301)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(synergy=True, costs=FREE))
    assert finishes(result) == {1: 600.0}


def test_preemption_pays_for_the_restart() -> None:
    jobs = [TraceJob(1, 0.0, 8, 1000.0), TraceJob(2, 300.0, 8, 100.0)]
    result = run(jobs, cluster(1), "srtf", "proportional", Setup(round_s=100.0, costs=SimCosts(restart_s=30.0)))
    assert finishes(result) == {1: 1130.0, 2: 400.0}
    assert result.counts.restarts == 1
    assert result.jobs[0].restarts == 1
    assert result.jobs[0].attained_s == pytest.approx(1030.0)


def test_the_first_start_costs_what_the_job_says() -> None:
    jobs = [TraceJob(1, 0.0, 1, 1000.0, startup_s=20.0, iterations=1000)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(costs=SimCosts(start_s=5.0)))
    assert finishes(result) == {1: 1020.0}
    assert result.jobs[0].to_100_iterations_s == pytest.approx(120.0)


def test_a_job_runs_as_fast_as_its_profile_says() -> None:
    jobs = [TraceJob(number, 0.0, 1, 1200.0, profile=donor()) for number in range(1, 8)]
    jobs.append(TraceJob(8, 0.0, 1, 1200.0, profile=vision()))
    assert finishes(run(jobs, cluster(1), "fifo", "proportional", Setup()))[8] == 1200.0
    assert finishes(run(jobs, cluster(1), "fifo", "tune-coded", Setup()))[8] == 600.0


def test_the_truth_counts_and_not_the_profile() -> None:
    jobs = [TraceJob(1, 0.0, 1, 1200.0, profile=vision(), truth=donor())]
    assert finishes(run(jobs, cluster(1), "fifo", "tune-coded", Setup())) == {1: 1200.0}


def test_a_lost_node_sends_its_jobs_back_to_their_checkpoint() -> None:
    jobs = [TraceJob(1, 0.0, 8, 1000.0)]
    setup = Setup(round_s=100.0, costs=FREE, checkpoint_s=300.0, failures=(NodeFailure("n1", 450.0, 900.0),))
    result = run(jobs, cluster(1), "fifo", "proportional", setup)
    assert finishes(result) == {1: 900.0 + 700.0}


@pytest.mark.parametrize(
    ("checkpoints", "saves", "done_s"), [(True, False, 300.0), (False, False, 0.0), (True, True, 500.0)]
)
@pytest.mark.parametrize("yielded", [False, True])
def test_a_requeue_loses_the_work_since_the_last_checkpoint(
    checkpoints: bool, saves: bool, done_s: float, yielded: bool
) -> None:
    setup = Setup(lanes=2, phased_moves=True, costs=replace(FREE, restart_s=40.0), checkpoint_s=300.0)
    world = World([TraceJob(1, 0.0, 8, 1000.0, checkpoints=checkpoints)], read_cluster("1x8:24:500", 2), setup)
    gateway, key = SimGateway(world), JobKey(1, 0)
    world.advance(0.0)
    gateway.apply(Place(key, ("n0001",), "test"))
    world.advance(500.0)
    if yielded:
        gateway.apply(Yield(key, "test"))
    if saves:
        gateway.apply(Migrate(key, (), "test"))
        world.advance(505.0)
        assert gateway.read().jobs[0].lease is not None
        assert not gateway.read().jobs[0].lease.saved
    world.advance(510.0)
    if saves:
        assert gateway.read().jobs[0].lease.saved
    gateway.apply(Requeue(key, hold=True, reason="test"))
    (job,) = world.live.values()
    assert job.done_s == done_s


def test_a_resumed_job_saves_no_checkpoint_any_more() -> None:
    setup = Setup(lanes=2, phased_moves=True, costs=replace(FREE, restart_s=40.0), checkpoint_s=300.0)
    world = World([TraceJob(1, 0.0, 8, 1000.0)], read_cluster("1x8:24:500", 2), setup)
    gateway, key = SimGateway(world), JobKey(1, 0)
    world.advance(0.0)
    gateway.apply(Place(key, ("n0001",), "test"))
    world.advance(500.0)
    for action in (Yield(key, "test"), Migrate(key, (), "test"), Resume(key, "test")):
        gateway.apply(action)
    world.advance(550.0)
    gateway.apply(Requeue(key, hold=True, reason="test"))
    assert [job.done_s for job in world.live.values()] == [500.0]


def test_a_run_ends_at_its_horizon() -> None:
    jobs = [TraceJob(1, 0.0, 1, 1000.0), TraceJob(2, 0.0, 1, 100.0)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(horizon_s=600.0))
    assert finishes(result) == {1: None, 2: 100.0}
    assert [key.id for key in result.unfinished] == [1]
    assert result.jobs[0].attained_s == 600.0


def test_a_run_ends_when_the_watched_jobs_have() -> None:
    jobs = [TraceJob(number, 300.0 * number, 8, 1000.0) for number in range(6)]
    result = run(jobs, cluster(1), "fifo", "proportional", Setup(until_done=(1, 3)))
    assert [job.id for job in result.jobs if job.finish_s is not None] == [0, 1, 2]


def test_a_job_that_can_never_run_is_bad_input() -> None:
    with pytest.raises(InputError, match="job 7 asks for 9 GPUs"):
        run([TraceJob(7, 0.0, 9, 10.0)], cluster(1), "fifo", "proportional", Setup())


def _oracle(jobs: list[TraceJob], gpus: int) -> dict[int, float]:
    """Second by second: strict FIFO, jobs run to their end, a decision at every second."""
    left = {job.id: job.work_s for job in jobs}
    ends: dict[int, float] = {}
    now = 0
    while left:
        running, free = [], gpus
        for job in sorted(jobs, key=lambda job: (job.submit_s, job.id)):
            if job.id in left and job.submit_s <= now:
                if job.gpus > free:
                    break
                free -= job.gpus
                running.append(job.id)
        now += 1
        for number in running:
            left[number] -= 1
            if left[number] <= 0:
                ends[number] = float(now)
                del left[number]
    return ends


traces = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 60)), min_size=1, max_size=12
).map(lambda rows: [TraceJob(n, float(at), gpus, float(work)) for n, (at, gpus, work) in enumerate(rows)])


@settings(max_examples=60, deadline=None)
@given(traces)
def test_fifo_equals_the_oracle(jobs: list[TraceJob]) -> None:
    result = run(jobs, cluster(2), "fifo", "proportional", Setup(round_s=1000.0, rounds_on_events=True))
    assert finishes(result) == _oracle(jobs, 16)


profiled = st.lists(
    st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 2, 4]), st.integers(1, 4000), st.booleans()),
    min_size=1,
    max_size=25,
).map(
    lambda rows: [
        TraceJob(n, float(at), gpus, float(work), profile=VISION if fast else DONOR, iterations=work)
        for n, (at, gpus, work, fast) in enumerate(rows)
    ]
)
VISION, DONOR = vision(), donor()


@settings(max_examples=40, deadline=None)
@given(profiled, st.sampled_from(["proportional", "tune-coded"]), st.booleans())
def test_leaving_out_rounds_changes_no_finish(jobs: list[TraceJob], allocate: str, synergy: bool) -> None:
    def with_skip(*, skip: bool) -> Result:
        return run(jobs, cluster(2), "fifo", allocate, Setup(round_s=300.0, synergy=synergy, costs=FREE, skip=skip))

    left_out, all_rounds = with_skip(skip=True), with_skip(skip=False)
    assert finishes(left_out) == finishes(all_rounds)
    assert left_out.counts.decided <= all_rounds.counts.decided


@settings(max_examples=40, deadline=None)
@given(profiled, st.sampled_from(["fifo", "srtf", "las"]), st.sampled_from(["proportional", "greedy", "tune-coded"]))
def test_the_samples_account_for_every_gpu_second(jobs: list[TraceJob], order: str, allocate: str) -> None:
    result = run(jobs, cluster(2), order, allocate, Setup(round_s=300.0))
    samples = result.samples
    held = sum(now.gpus_held * (then.time_s - now.time_s) for now, then in pairwise(samples))
    assert held == pytest.approx(sum(job.attained_s * job.gpus for job in result.jobs), rel=1e-6, abs=1e-3)
    assert all(0 <= sample.gpus_held <= result.gpus for sample in samples)
    assert all(0 <= sample.cpus_used <= result.cpus for sample in samples)
    assert not result.unfinished
    assert samples[-1].gpus_held == 0
