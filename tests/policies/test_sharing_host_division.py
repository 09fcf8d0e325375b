"""CPUs and memory under sharing: the holders of a host divide it, packed jobs as one, and memory never overflows."""

from __future__ import annotations

from dataclasses import replace

from gandiva_rig import NOTHING, after, decided, held, host, key, of, on, profile, world
from snapshots import cluster

from cadenza.policies.allocation.problem import Plan
from cadenza.policies.core.actions import Place, Tune
from cadenza.policies.core.decision import Memory, SharingMemory
from cadenza.policies.core.model import Share
from cadenza.policies.sharing.placement.host_division import caches_mb

PROPORTIONAL = Share("a", 1, 6, 25_000)


def tuned(decision):
    return {a.job.id: a.shares for a in of(Tune, decision)}


def first_gets_most(case):
    """An allocation that gives the first job all but one CPU for each of the others."""
    (server,) = case.servers
    rest = len(case.jobs) - 1
    cpus = [server.cpus - rest, *[1] * rest]
    shares = zip(case.jobs, cpus, strict=True)
    each = server.memory_mb // len(cpus)
    return Plan({job.key: (Share(server.name, job.gpus, count, each),) for job, count in shares})


def test_with_proportional_a_holder_has_g_of_g_shares():
    jobs = [on(1, "a", 0), on(2, "a", 1, 2)]
    found = tuned(decided(world(*jobs), gandiva=NOTHING))
    assert found == {1: (PROPORTIONAL,), 2: (Share("a", 2, 12, 50_000),)}
    again = [replace(job, placement=found[job.key.id]) for job in jobs]
    assert tuned(decided(world(*again), gandiva=NOTHING)) == {}


def test_the_holders_of_this_moment_divide_the_cpus_by_the_allocation():
    jobs = [on(1, "a", 0), on(2, "a", 1), on(3, "a", 0, lane=1, state="yielded", waited_s=5.0)]
    found = tuned(decided(world(*jobs), gandiva=NOTHING, allocate=first_gets_most))
    assert {number: shares[0].cpus for number, shares in found.items()} == {1: 23, 2: 1, 3: 6}
    assert {shares[0].memory_mb for shares in found.values()} == {4096}  # what their profiles can use


def test_packed_jobs_count_once_and_split():
    memory = Memory(sharing=SharingMemory(packs=((key(1), key(2)),)))
    jobs = [on(1, "a", 0), on(2, "a", 0, lane=1), on(3, "a", 1)]
    found = tuned(decided(world(*jobs), memory, replace(NOTHING, pack=True)))
    assert found == {
        1: (Share("a", 1, 3, 12_500),),
        2: (Share("a-l1", 1, 3, 12_500),),
        3: (PROPORTIONAL,),
    }


def test_a_job_that_starts_on_free_gpus_gets_its_share_at_once():
    decision = decided(world(on(1, "a", 0), held(9)), gandiva=NOTHING, allocate=first_gets_most)
    (start,) = of(Place, decision)
    assert start.shares == (Share("a", 1, 1, 50_000),)
    assert tuned(decision) == {1: (Share("a", 1, 23, 50_000),)}


def test_a_job_that_will_take_turns_gets_what_it_needs():
    jobs = [on(number, "a", number) for number in range(4)]
    decision = decided(world(*jobs, held(9)), gandiva=NOTHING)
    (start,) = of(Place, decision)
    assert start.shares == (Share("a-l1", 1, 6, 4096),)
    assert {shares[0].memory_mb for shares in tuned(decision).values()} == {4096}


def test_a_job_of_two_hosts_has_its_proportional_share_of_each():
    parts = tuple(Share(name, 2, 12, 50_000) for name in ("a", "b"))
    wide = replace(on(1, "a", 0, 1), gpus=4, nodes=("a", "b"), num_nodes=2, placement=parts)
    found = tuned(decided(world(wide, on(2, "a", 2), hosts=("a", "b")), gandiva=NOTHING, allocate=first_gets_most))
    assert {number: shares[0].cpus for number, shares in found.items()} == {2: 12}


def test_an_unmanaged_job_keeps_what_it_has():
    other = replace(on(1, "a", 0, 1), options=None)
    other = replace(other, lease=replace(other.lease, exclusive=True))
    found = tuned(decided(world(other, on(2, "a", 2)), gandiva=NOTHING, allocate=first_gets_most))
    assert {number: shares[0].cpus for number, shares in found.items()} == {2: 12}


# --- Host memory ---------------------------------------------------------------------------------------


def test_a_host_admits_as_many_jobs_as_its_memory_holds_with_their_gpu_state():
    heavy = profile(memory_gb_per_gpu=(20.0,))  # and 1 GB of GPU state
    jobs = [on(number, "a", number, profile=heavy) for number in range(4)]
    jobs = [replace(job, memory_mb=20 * 1024) for job in jobs]
    waiting = held(9, memory_mb=20 * 1024, profile=heavy)
    room = tuple(replace(lane, memory_mb=104 * 1024) for lane in host("a", 2, tuple(jobs)))
    decision = decided(cluster(*jobs, waiting, nodes=room), gandiva=NOTHING)
    assert of(Place, decision) == []
    assert decision.reasons[key(9)].startswith("stays queued")
    more = tuple(replace(lane, memory_mb=105 * 1024) for lane in room)
    assert [a.nodes for a in of(Place, decided(cluster(*jobs, waiting, nodes=more), gandiva=NOTHING))] == [("a-l1",)]


def test_who_stops_gives_back_memory_that_it_does_not_need():
    rich = on(1, "a", 0, placement=(Share("a", 1, 6, 60_000),), held_s=90.0, vtime_s=90.0)
    other = on(2, "a", 0, lane=1, state="yielded", waited_s=90.0)
    found = tuned(decided(world(rich, other), gandiva=NOTHING))
    assert found[1] == (Share("a", 1, 6, 4096),)
    assert found[2] == (Share("a-l1", 1, 6, 4096),)


def test_a_decision_is_remembered_without_anything_left_over():
    snapshot = world(on(1, "a", 0))
    memory = after(snapshot, decided(snapshot, gandiva=NOTHING))
    assert memory.sharing.packs == memory.sharing.lost == memory.sharing.moved_s == ()
    gone = replace(snapshot, jobs=())
    assert after(gone, decided(gone, memory)).sharing.alone == ()


def test_caches_take_what_the_memory_axis_says_of_more_memory_than_was_asked_for():
    grid = {"memory_gb_per_gpu": (2.0, 8.0), "throughput": ((0.5, 1.0),), "cpus_per_gpu": (6.0,)}
    job = replace(on(1, "a", 0), profile=replace(profile(), **grid), memory_mb=4096)
    assert caches_mb(job, (Share("a", 1, 9, 4096),)) == ()
    assert caches_mb(job, (Share("a", 1, 9, 10_000),)) == (10_000 - 2048,)
    assert caches_mb(replace(job, memory_mb=1000), (Share("a", 1, 9, 2000),)) == (None,)
    wide = replace(job, num_nodes=2, memory_mb=8192)
    assert caches_mb(wide, (Share("a", 1, 6, 4096), Share("b", 2, 6, 9000))) == (None, 9000 - 4096)
    point = replace(job, profile=profile(memory_gb_per_gpu=(2.0,), cpus_per_gpu=(6.0,)))
    assert caches_mb(point, (Share("a", 1, 9, 10_000),)) == (None,)
    assert caches_mb(replace(job, profile=None), (Share("a", 1, 9, 10_000),)) == ()


def test_a_tune_says_what_caches_may_take():
    grid = {"memory_gb_per_gpu": (2.0, 40.0), "throughput": ((0.5, 1.0),), "cpus_per_gpu": (6.0,)}
    job = replace(on(1, "a", 0), profile=replace(profile(), **grid))
    (tune,) = of(Tune, decided(world(job), gandiva=NOTHING))
    assert tune.shares[0].memory_mb > job.memory_mb
    assert tune.caches_mb == (tune.shares[0].memory_mb - 2048,)
