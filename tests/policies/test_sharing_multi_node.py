"""Jobs of several hosts grow and shrink by whole hosts: who gives which back, when they get others, what they keep."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from gandiva_rig import NOTHING, SHARING, after, decided, held, of, on, pace, world
from hypothesis import example, given, settings
from hypothesis import strategies as st
from snapshots import NOW, job, lease

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import Place, Resize
from cadenza.policies.core.decision import Growth, Memory, SharingMemory
from cadenza.policies.core.model import Job, JobKey, Options, Progress, Share
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.sharing.state.settings import GandivaSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate

ELASTIC = replace(NOTHING, elastic=True)
HALVES = Options(min_gpus=4, max_gpus=12)


def wide(number: int, *hosts: str, lane: int = 0, state: str = "held", options: Options = HALVES, **facts) -> Job:
    """A job with all four GPUs of some hosts."""
    nodes = tuple(f"{host}-l{lane}" if lane else host for host in hosts)
    told = {"ready": True, "checkpoints": True, "step": 100, "iteration_s": 0.1, "pace": pace(0.1), "held_s": 10.0}
    return job(
        number,
        **{
            "gpus": 4 * len(hosts),
            "cpus": 24 * len(hosts),
            "memory_mb": 32_000 * len(hosts),
            "num_nodes": len(hosts),
            "nodes": nodes,
            "lease": lease(state, 0, 1, 2, 3, hosts=hosts, **told),
            "placement": tuple(Share(node, 4, 24, 32_000) for node in nodes),
            "progress": Progress(NOW, 7200.0, 600.0, running=True),
            "options": options,
            **facts,
        },
    )


def resized(decision) -> dict[int, list[tuple[str, int]]]:
    return {action.job.id: [share[:2] for share in action.shares] for action in of(Resize, decision)}


def test_a_host_is_given_back_for_a_job_that_waits():
    decision = decided(world(wide(1, "a", "b"), held(9, 4), hosts=("a", "b")), Memory(), ELASTIC)
    assert resized(decision) == {1: [("b", 4)]}
    assert decision.reasons[JobKey(1, 0)] == "gives GPUs of a back: job 9 needs them"
    assert [action.nodes for action in of(Place, decision)] == [("a",)]


def test_as_many_hosts_as_a_job_of_several_needs_and_no_more_than_can_be_spared():
    def left(least: int) -> dict[int, list[tuple[str, int]]]:
        job = wide(1, "a", "b", "c", options=Options(min_gpus=least))
        waiting = held(9, 8, num_nodes=2, cpus=24, memory_mb=16_000)
        return resized(decided(world(job, waiting, hosts=("a", "b", "c")), Memory(), ELASTIC))

    assert left(4) == {1: [("c", 4)]}
    assert left(1) == {1: [("c", 4)]}
    assert left(5) == {}
    assert left(8) == {}


def test_two_jobs_of_several_hosts_give_one_each():
    two = (wide(1, "a", "b"), wide(2, "c", "d", options=Options(min_gpus=4)))
    waiting = held(9, 8, num_nodes=2, cpus=24, memory_mb=16_000)
    decision = decided(world(*two, waiting, hosts=("a", "b", "c", "d")), Memory(), ELASTIC)
    assert resized(decision) == {1: [("b", 4)], 2: [("d", 4)]}


@pytest.mark.parametrize("options", [Options(), Options(max_gpus=16), None])
def test_without_a_minimum_it_keeps_what_it_asked_for(options):
    decision = decided(world(wide(1, "a", "b", options=options), held(9, 4), hosts=("a", "b")), Memory(), ELASTIC)
    assert resized(decision) == {}


def test_a_job_that_stands_without_a_lease_is_made_way_for():
    standing = on(2, "b", 0, 1, 2, 3, lane=1, state="waiting", step=0)
    decision = decided(world(wide(1, "a", "b"), standing, hosts=("a", "b")), Memory(), ELASTIC)
    assert resized(decision) == {1: [("a", 4)]}
    assert "job 2 waits for them" in decision.reasons[JobKey(1, 0)]


def test_a_job_that_has_not_the_same_on_each_host_stays_and_is_told():
    uneven = wide(1, "a", "b", gpus=6)
    uneven = replace(uneven, lease=replace(uneven.lease, gpus=uneven.lease.gpus[:6]))
    decision = decided(world(uneven, held(9, 4), hosts=("a", "b")), Memory(), ELASTIC)
    assert resized(decision) == {}
    assert "its size stays: its nodes do not all have the same" in decision.reasons[JobKey(1, 0)]


# --- Back again -----------------------------------------------------------------------------------------


def shrunk(*hosts: str, seconds: float = 100.0, **facts) -> Memory:
    """Memory of job 1, which asked for two nodes; ``hosts`` have been idle for a while."""
    spare = tuple((host, NOW - seconds) for host in hosts)
    return Memory(sharing=SharingMemory(spare_s=spare, asked_gpus=((1, 8),), asked_nodes=((1, 2),), **facts))


def test_what_it_asked_for_is_remembered():
    snapshot = world(wide(1, "a", "b"), held(9, 4), hosts=("a", "b"))
    memory = after(snapshot, decided(snapshot, Memory(), ELASTIC)).sharing
    assert (memory.asked_gpus, memory.asked_nodes) == (((1, 8),), ((1, 2),))
    one = world(on(1, "a", 0, options=Options(max_gpus=4)))
    idle = Memory(sharing=SharingMemory(spare_s=(("a", NOW - 100),)))
    assert after(one, decided(one, idle, ELASTIC)).sharing.asked_nodes == ()


@pytest.mark.parametrize("lane", [0, 1])
def test_it_gets_hosts_again_in_its_lane_once_they_have_been_idle(lane: int):
    end = "-l1" if lane else ""
    snapshot = world(wide(1, "b", lane=lane), hosts=("a", "b", "c"))
    assert resized(decided(snapshot, shrunk("a"), ELASTIC)) == {1: [(f"a{end}", 4), (f"b{end}", 4)]}
    assert resized(decided(snapshot, shrunk("a", "c"), ELASTIC)) == {1: [(f"{host}{end}", 4) for host in "abc"]}
    assert resized(decided(snapshot, shrunk("a", seconds=10.0), ELASTIC)) == {}
    assert resized(decided(snapshot, shrunk(), ELASTIC)) == {}
    assert resized(decided(snapshot, shrunk("a", moved_s=((1, NOW - 9),)), ELASTIC)) == {}


def test_it_gets_no_host_that_somebody_has_a_gpu_of_and_none_while_others_wait():
    beside = world(wide(1, "b"), on(2, "a", 3), hosts=("a", "b"))
    assert resized(decided(beside, shrunk("a"), ELASTIC)) == {}
    waiting = world(wide(1, "b"), held(9, 4, gpu_type="other"), hosts=("a", "b"))
    assert resized(decided(waiting, shrunk("a"), ELASTIC)) == {}


def test_a_job_that_asked_for_one_node_never_gets_another():
    snapshot = world(wide(1, "a"), hosts=("a", "b"))
    assert resized(decided(snapshot, Memory(sharing=SharingMemory(spare_s=(("b", NOW - 100),))), ELASTIC)) == {}


def test_who_gained_nothing_goes_back_and_stays_so_for_a_while():
    row = Growth(1, 4, 0.1, NOW - 200.0)
    grown = world(wide(1, "a", "b"), hosts=("a", "b"))
    decision = decided(grown, shrunk(growths=(row,)), ELASTIC)
    assert resized(decision) == {1: [("a", 4)]}
    assert "with 8 GPUs it did 100% of the work that it did with 4" in decision.reasons[JobKey(1, 0)]
    vain = after(grown, decision)
    idle = replace(vain, sharing=replace(vain.sharing, spare_s=(("b", NOW - 100.0),), moved_s=()))
    assert resized(decided(world(wide(1, "a"), hosts=("a", "b")), idle, ELASTIC)) == {}


def test_a_job_of_two_nodes_starts_with_its_share_of_both():
    (place,) = of(Place, decided(world(held(9, 8, num_nodes=2), hosts=("a", "b"))))
    assert [share[:2] for share in place.shares] == [("a", 4), ("b", 4)]
    assert sum(share.cpus for share in place.shares) == 48


# --- In the simulator -----------------------------------------------------------------------------------


def trace(rng: Random):
    for number in range(20):
        gpus, work_s = rng.choice((1, 2, 4, 8, 12)), rng.uniform(20, 200)
        elastic = rng.random() < 0.6
        yield TraceJob(
            id=number,
            submit_s=rng.uniform(0, 200),
            gpus=gpus,
            work_s=work_s,
            iterations=int(work_s),
            memory_gb_per_gpu=1.0,
            min_gpus=min(gpus, 4) if elastic else None,
            max_gpus=12 if elastic else None,
        )


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 10**6))
@example(1)
def test_every_job_ends_and_no_host_is_overbooked(seed: int):
    parts = frozenset({PARTITION})
    gandiva = GandivaSettings(move_every_s=30.0, idle_s=10.0, move_s=2.0)
    rules = PolicySettings(partitions=parts, sharing=replace(SHARING, partitions=parts), gandiva=gandiva)
    setup = Setup(round_s=10.0, rounds_on_events=True, lanes=2, costs=SimCosts(resize_s=3.0))
    policy = build("fifo", "proportional", "gandiva", rules)
    jobs = list(trace(Random(seed)))  # noqa: S311 - a reproducible workload
    result = simulate(jobs, read_cluster("3x4:12:128", 2), policy, setup)
    assert result.unfinished == ()
