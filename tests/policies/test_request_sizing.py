"""Requests of pending jobs by their profiles, and Slurm's allocation as a floor for running ones."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest
from gandiva_rig import NOTHING, SHARING, decided, held, of, on, profile, world
from snapshots import cluster, job, key, node

from cadenza.policies.allocation.cadenza.allocate import cadenza
from cadenza.policies.core.actions import Place, Tune
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import Share
from cadenza.policies.core.profile import least_cpus
from cadenza.policies.ledger import remember
from cadenza.policies.request_sizing import as_sized, requests
from cadenza.policies.sharing.placement.host_division import CPU_HEADROOM

CPUS = {"cpus_per_gpu": (1.0, 2.0, 4.0, 8.0), "memory_gb_per_gpu": (4.0,)}
HUNGRY = profile(**CPUS, throughput=((0.25,), (0.5,), (1.0,), (2.0,)))
SATED = profile(**CPUS, throughput=((0.5,), (1.0,), (1.0,), (1.0,)))
CACHED = profile(cpus_per_gpu=(1.0,), memory_gb_per_gpu=(4.0, 8.0, 64.0), throughput=((0.5, 1.0, 1.2),))
FLOORED = replace(SHARING, floor=True)


def waiting(found, **facts):
    return job(1, state="PENDING", state_reason="Resources", profile=found, **facts)


NODES = (node(), node(lane=1))


def size_of(one, memory=None, nodes=NODES):
    return requests(cluster(one, nodes=nodes), memory or Memory(), SHARING).get(one.key)


@pytest.mark.parametrize(
    ("found", "asked", "cpus"),
    [
        (HUNGRY, 1, 4),  # as fast as with the 6 of its proportional share, for which 4 are enough
        (HUNGRY, 4, None),
        (HUNGRY, 8, None),  # more than its proportional share, as its user wants it
        (HUNGRY, 12, 8),  # what is no use to it is left to others
        (SATED, 6, 2),
        (SATED, 1, 2),
        (None, 1, None),
    ],
)
def test_the_fewest_cpus_that_are_as_fast_as_its_share_or_its_request(found, asked, cpus):
    size = size_of(waiting(found, cpus=asked))
    assert (size and size.cpus) == cpus
    assert size is None or size.memory_mb == 8000


@pytest.mark.parametrize(("asked", "memory_mb"), [(4096, 8192), (8192, 8192), (30_000, 30_000)])
def test_memory_is_only_raised_and_no_further_than_its_share(asked, memory_mb):
    size = size_of(waiting(CACHED, cpus=1, memory_mb=asked))
    assert (size.memory_mb if size else asked) == memory_mb


def test_parts_and_tasks_come_out_whole():
    size = size_of(waiting(HUNGRY, gpus=4, cpus=4, num_nodes=2, memory_mb=17_001, tasks=4))
    assert (size.cpus, size.memory_mb) == (16, 17_001)
    odd = size_of(waiting(SATED, gpus=1, cpus=9, tasks=3))
    assert odd.cpus == 3


def test_the_narrowest_node_that_it_may_get_counts():
    nodes = (node(), node("thin", cpus=8), node("other", cpus=4, partitions=("else",)), node("off", cpus=4, up=False))
    assert size_of(waiting(HUNGRY, cpus=1), nodes=nodes).cpus == 2
    assert size_of(waiting(HUNGRY, cpus=1, required_nodes=("node1",)), nodes=nodes).cpus == 4


@pytest.mark.parametrize(
    "facts",
    [
        {"slurm_priority": 0},  # its owner holds it
        {"options": None},
        {"partition": "else"},
        {"gpus": 0},
        {"memory_mb": 0},
    ],
)
def test_who_is_not_asked_about(facts):
    assert size_of(waiting(HUNGRY, **{"cpus": 1, **facts})) is None


def test_a_job_is_sized_once_and_its_owner_has_the_last_word():
    one = waiting(HUNGRY, cpus=1)
    size = size_of(one)
    assert "2.00 times" not in size.reason
    assert "4.00 times as fast as with 1 CPUs" in size.reason
    memory = remember(Memory(), [size], cluster(one))
    assert memory.sized == {key(1): (1, 8000)}
    assert size_of(replace(one, cpus=2), memory) is None
    assert remember(memory, [], cluster()).sized == {}


def test_a_limit_of_its_account_gives_it_its_own_request_back():
    memory = Memory(sized={key(1): (1, 8000)})
    stuck = waiting(HUNGRY, cpus=4)
    assert size_of(stuck, memory) is None
    back = size_of(replace(stuck, state_reason="QOSMaxCpuPerUserLimit"), memory)
    assert (back.cpus, back.memory_mb) == (1, 8000)
    assert "QOSMaxCpuPerUserLimit" in back.reason
    assert size_of(replace(stuck, cpus=1, state_reason="AssocGrpCpuLimit"), memory) is None


def test_a_held_job_is_placed_with_its_new_request():
    one = held(1, cpus=1, profile=HUNGRY)
    snapshot = world(one)
    sizes = requests(snapshot, Memory(), SHARING)
    assert sizes[key(1)].cpus == 4
    assert as_sized(snapshot, sizes).jobs[0].cpus == 4
    assert as_sized(snapshot, {}) is snapshot


def test_fewest_cpus():
    assert [least_cpus(SATED, 2, cpus, 16_000) for cpus in (1, 2, 3, 4, 9)] == [1, 2, 2, 4, 4]
    assert [least_cpus(SATED, 2, cpus, 16_000, headroom=1.25) for cpus in (1, 2, 3, 4, 9)] == [1, 2, 3, 4, 5]


# --- The floor -----------------------------------------------------------------------------------------


def tuned(*jobs, allocate=cadenza, sharing=FLOORED):
    found = decided(world(*jobs), gandiva=NOTHING, sharing=sharing, allocate=allocate)
    return {action.job.id: action.shares[0] for action in of(Tune, found)}


def test_without_a_profile_a_job_keeps_the_cpus_that_it_asked_for():
    jobs = [on(1, "a", 0, cpus=16, profile=None), on(2, "a", 1, profile=HUNGRY)]
    jobs[0] = replace(jobs[0], placement=(Share("a", 1, 16, 8000),))
    assert tuned(*jobs, sharing=SHARING)[1].cpus < 16
    found = tuned(*jobs)
    assert found.get(1, jobs[0].placement[0]).cpus == 16
    assert found[2].cpus == 8


def test_nobody_is_slower_than_with_what_it_asked_for():
    jobs = [on(1, "a", 0, cpus=8, profile=HUNGRY), *(on(n, "a", n - 1, profile=SATED) for n in (2, 3))]
    found = tuned(*jobs)
    assert found.get(1, Share("a", 1, 8, 0)).cpus >= 8
    assert all(found[n].cpus >= 2 for n in (2, 3) if n in found)


def test_what_no_profile_needs_goes_to_who_can_use_it():
    jobs = [on(1, "a", 0, profile=HUNGRY), *(on(n, "a", n - 1, profile=SATED) for n in (2, 3, 4))]
    found = tuned(*jobs)
    assert found[1].cpus >= 8
    assert sum(found[n].cpus for n in (1, 2, 3, 4)) <= 24


def test_who_has_not_completed_an_iteration_lends_nothing():
    jobs = [on(1, "a", 0, profile=HUNGRY), *(on(n, "a", n - 1, profile=SATED, step=0) for n in (2, 3, 4))]
    found = tuned(*jobs)
    assert [found.get(n, Share("a", 1, 6, 0)).cpus for n in (2, 3, 4)] == [6, 6, 6]


def test_who_lends_keeps_more_than_its_profile_needs_beside_nobody():
    jobs = [on(1, "a", 0, profile=HUNGRY), *(on(n, "a", n - 1, profile=SATED) for n in (2, 3, 4))]
    needed = least_cpus(SATED, 1, 6, 8000)
    found = tuned(*jobs)
    assert {found[n].cpus for n in (2, 3, 4)} == {ceil(needed * CPU_HEADROOM)}
    assert needed < ceil(needed * CPU_HEADROOM) < 6


def test_what_the_books_give_to_jobs_that_are_not_ours_is_theirs():
    other = replace(on(1, "a", 0, cpus=20), options=None)
    other = replace(other, lease=replace(other.lease, exclusive=True))
    assert tuned(other, on(2, "a", 1, profile=HUNGRY, cpus=1))[2].cpus == 4
    assert tuned(other, on(2, "a", 1, profile=HUNGRY, cpus=1), sharing=SHARING)[2].cpus == 8
    most = replace(other, cpus=23)
    had = (Share("a", 1, 8, 8000),)
    assert tuned(most, on(2, "a", 1, profile=HUNGRY, cpus=1, placement=had))[2].cpus == 1


def test_lanes_that_promise_more_than_the_host_has_leave_the_allocations_guarantee():
    jobs = [on(n, "a", n - 1, cpus=20, profile=None, lane=n - 1) for n in (1, 2)]
    found = tuned(*jobs)
    assert sum(share.cpus for share in found.values()) <= 24


def test_memory_never_falls_below_what_was_asked_for():
    rich = on(1, "a", 0, placement=(Share("a", 1, 6, 60_000),), held_s=90.0, vtime_s=90.0)
    other = on(2, "a", 0, lane=1, state="yielded", waited_s=90.0)
    found = tuned(rich, other)
    assert found[1].memory_mb == 8000


def test_a_held_job_is_placed_with_all_the_memory_that_it_asked_for():
    jobs = [on(n, "a", n - 1) for n in (1, 2, 3, 4)]
    decision = decided(world(*jobs, held(9)), gandiva=NOTHING, sharing=FLOORED)
    (start,) = of(Place, decision)
    assert start.shares == (Share("a-l1", 1, 6, 8000),)
