"""The division of a host: floors, no CPU twice, no change without need, and the order of choice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.tuning import topology
from cadenza.sidecar.agent.tuning.planner import MILLI, MIN_MILLI, Claim, Grant, Request, divide, plan
from cadenza.sidecar.agent.tuning.topology import Cpu, Topology


def host(nodes: int = 2, cores: int = 4, threads: int = 1, memory_mb: int = 64_000) -> Topology:
    """Return a host whose CPU numbers go over all cores first, then over their second threads."""
    total = nodes * cores
    cpus = [
        Cpu(thread * total + node * cores + core, node * cores + core, node)
        for thread in range(threads)
        for node in range(nodes)
        for core in range(cores)
    ]
    return Topology(tuple(sorted(cpus)), memory_mb, {0: 0, 1: 1})


def job(number: int, cpus: float | None, wish: float | None = None, **more: object) -> Claim:
    floor = None if cpus is None else round(cpus * MILLI)
    return Claim(JobKey(number, 0), floor, more.pop("mb", 1000), None if wish is None else round(wish * MILLI), **more)


def cpus_of(plans: Mapping[JobKey, Grant], number: int) -> set[int]:
    return set(plans[JobKey(number, 0)].cpus)


# --- amounts ---


@pytest.mark.parametrize(
    ("capacity", "requests", "given_"),
    [
        (8, [(2, 4), (2, None)], [4, 2]),  # out of what no job holds
        (4, [(2, 3), (2, 1)], [3, 1]),  # a donor gives
        (4, [(2, None), (2, 1)], [2, 2]),  # without takers it keeps all
        (4, [(2, 6), (2, None)], [2, 2]),  # nothing to give
        (8, [(2, 6), (2, 6)], [4, 4]),  # in proportion to what each lacks
        (8, [(2, 8), (None, None)], [2, 0]),  # the other may need anything
        (4, [(4, 6), (4, None)], [4, 4]),  # lanes: the books overlap
    ],
)
def test_division(capacity: int, requests: list[tuple[int | None, int | None]], given_: list[int]) -> None:
    assert divide(capacity, [Request(*request) for request in requests]) == given_


REQUEST = st.builds(Request, st.one_of(st.none(), st.integers(1, 40)), st.one_of(st.none(), st.integers(1, 90)))
REQUESTS = st.lists(REQUEST)


@given(st.integers(1, 100), REQUESTS)
def test_division_keeps_floors_and_the_sum(capacity: int, requests: list[Request]) -> None:
    given_ = divide(capacity, requests)
    floors = [request.floor or 0 for request in requests]
    assert sum(given_) <= max(capacity, sum(floors))
    for request, floor, got in zip(requests, floors, given_, strict=True):
        wish = floor if request.wish is None else request.wish
        assert min(floor, wish) <= got <= max(floor, wish)
    if any(request.floor is None for request in requests):
        assert given_ == floors


# --- CPUs ---


@st.composite
def cases(draw: st.DrawFn) -> tuple[Topology, list[Claim]]:
    where = host(draw(st.integers(1, 2)), draw(st.integers(1, 6)), draw(st.integers(1, 2)))
    ids = [cpu.id for cpu in where.cpus]
    amount = st.sampled_from([0.25, 0.5, 1, 1.5, 2, 3, 4])
    found = []
    free = set(ids)
    for number in range(draw(st.integers(1, 5))):
        own = frozenset(draw(st.sets(st.sampled_from(sorted(free)), max_size=3))) if free else frozenset()
        free -= own
        claim = job(
            number + 1,
            draw(st.one_of(st.none(), amount)),
            draw(st.one_of(st.none(), amount)),
            own=own,
            near=frozenset(draw(st.sets(st.integers(0, 1), max_size=1))),
            has=frozenset(draw(st.sets(st.sampled_from(ids), max_size=4))),
            running=draw(st.booleans()),
        )
        found.append(claim)
    return where, found


def exclusive(plans: Mapping[JobKey, Grant]) -> Counter[int]:
    return Counter(cpu for grant in plans.values() if not grant.quota for cpu in grant.cpus)


@settings(max_examples=60)
@given(cases())
def test_plans_are_sound(case: tuple[Topology, list[Claim]]) -> None:
    where, found = case
    plans = plan(where, found)
    assert set(plans) == {claim.key for claim in found if claim.tuned and claim.running}
    capacity = len(where.cpus) * MILLI
    floors = sum(claim.floor or MIN_MILLI for claim in found if claim.running)
    for claim in found:
        if claim.key not in plans:
            continue
        grant = plans[claim.key]
        floor = claim.floor or MIN_MILLI
        assert grant.milli >= min(floor, claim.wish_milli or floor)
        assert grant.cpus
        assert grant.cpus <= {cpu.id for cpu in where.cpus}
        assert len(grant.cpus) * MILLI >= min(grant.milli, capacity)
        assert grant.quota or len(grant.cpus) * MILLI == grant.milli
    if floors <= capacity:
        whole = exclusive(plans)
        assert all(count == 1 for count in whole.values())
        shared = {cpu for grant in plans.values() if grant.quota for cpu in grant.cpus}
        assert not shared & set(whole)
        bound = {cpu for claim in found if claim.running and not claim.tuned for cpu in claim.own}
        assert not bound & {cpu for grant in plans.values() for cpu in grant.cpus}
        assert sum(grant.milli for grant in plans.values()) <= capacity


@settings(max_examples=60)
@given(cases(), st.randoms(use_true_random=False))
def test_plans_depend_on_the_claims_alone(case: tuple[Topology, list[Claim]], random: object) -> None:
    where, found = case
    mixed = list(found)
    random.shuffle(mixed)
    assert plan(where, mixed) == plan(where, found)


@settings(max_examples=60)
@given(cases())
@example(
    # The CPU that both share was at times the second job's own in the next plan, which then shared another one.
    (
        Topology((Cpu(0, 0, 0), Cpu(1, 1, 0), Cpu(2, 0, 0), Cpu(3, 1, 0)), 64_000, {0: 0, 1: 1}),
        [job(1, 0.25, 1.5), job(2, None, 3, own=frozenset({0}), has=frozenset({1}))],
    )
)
def test_a_plan_in_force_is_the_next_plan(case: tuple[Topology, list[Claim]]) -> None:
    where, found = case
    plans = plan(where, found)
    after = [replace(one, has=plans[one.key].cpus) if one.key in plans else one for one in found]
    again = plan(where, after)
    assert {key: grant.milli for key, grant in again.items()} == {key: grant.milli for key, grant in plans.items()}
    settled = plan(where, [replace(one, has=again[one.key].cpus) if one.key in again else one for one in found])
    assert settled == again


def test_a_job_that_comes_gets_its_cpus_and_the_others_keep_theirs() -> None:
    before = [job(1, 2, 5), job(2, 2, 2)]
    plans = plan(host(), before)
    held = [replace(one, has=plans[one.key].cpus) for one in before]
    after = plan(host(), [*held, job(3, 4)])
    assert len(cpus_of(after, 1)) == 2
    assert cpus_of(after, 1) < cpus_of(plans, 1)
    assert cpus_of(after, 2) == cpus_of(plans, 2)


def test_a_job_of_unknown_size_gets_everything_that_was_extra() -> None:
    plans = plan(host(), [job(1, 2, 5), job(2, None)])
    assert plans[JobKey(1, 0)].milli == 2 * MILLI


def test_one_that_waits_for_its_lease_needs_no_cpu_but_its_memory() -> None:
    waiting = job(2, 6, mb=60_000, running=False)
    (grant,) = plan(host(), [job(1, 2, 8, wish_mb=10_000), waiting]).values()
    assert (grant.milli, grant.memory_mb) == (8 * MILLI, 4000)


def test_memory_stays_below_slurms_own_limit() -> None:
    (grant,) = plan(host(), [job(1, 2, wish_mb=9000, ceiling_mb=2000)]).values()
    assert grant.memory_mb == 2000


def test_the_jobs_numa_node_comes_first() -> None:
    assert cpus_of(plan(host(), [job(1, 2, 4, own=frozenset({4, 5}))]), 1) == {4, 5, 6, 7}
    assert cpus_of(plan(host(), [job(1, 2, 3, near=frozenset({1}))]), 1) == {4, 5, 6}


def test_whole_cores_come_before_second_threads_and_shared_cores_last() -> None:
    smt = host(1, 4, 2)  # CPU 4 is the second thread of core 0, and so on
    assert cpus_of(plan(smt, [job(1, 1, 4)]), 1) == {0, 1, 2, 3}
    assert cpus_of(plan(smt, [job(1, 1, 5, own=frozenset({1})), job(2, 1, own=frozenset({0}))]), 1) == {1, 2, 3, 5, 6}


def test_fractions_share_cpus_by_quota() -> None:
    plans = plan(host(1, 2), [job(1, 0.5, 0.75), job(2, 0.5, 0.25), job(3, 0.5, 0.75), job(4, 0.5, 0.25)])
    assert [grant.milli for grant in plans.values()] == [750, 250, 750, 250]
    assert all(grant.quota and grant.cpus == {0, 1} for grant in plans.values())


# --- topology ---


def test_topology_of_sysfs(tmp_path: Path) -> None:
    files = {
        "sys/devices/system/cpu/online": "0-2,5",
        **{f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list": f"{n % 4}-{n % 4}" for n in (0, 2)},
        "sys/devices/system/cpu/cpu1/topology/thread_siblings_list": "1,5",
        "sys/devices/system/cpu/cpu5/topology/thread_siblings_list": "1,5",
        "sys/devices/system/node/node0/cpulist": "0-1",
        "sys/devices/system/node/node1/cpulist": "2,5",
        "proc/meminfo": "MemTotal:       2048000 kB\n",
        "proc/driver/nvidia/gpus/0000:07:00.0/information": "Model: \t\t NVIDIA H100\nDevice Minor: \t 3\n",
        "sys/bus/pci/devices/0000:07:00.0/numa_node": "1\n",
        "proc/driver/nvidia/gpus/0000:08:00.0/information": "Device Minor: \t 4\n",
        "sys/bus/pci/devices/0000:08:00.0/numa_node": "-1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = topology.read(tmp_path)
    assert found.cpus == (Cpu(0, 0, 0), Cpu(1, 1, 0), Cpu(2, 2, 1), Cpu(5, 1, 1))
    assert (found.memory_mb, found.gpu_nodes) == (2000, {3: 1})
    assert found.nodes_of([3, 4]) == {1}
