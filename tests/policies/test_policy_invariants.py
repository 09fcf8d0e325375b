"""Invariants of every ordering with every allocation, round by round, through simulated runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import pytest
from strategies import KINDS

from cadenza.policies.allocation.problem import Server, placement_speed, proportional_share, share_speed
from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Node, Placement
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import PARTITION
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.registry import ENTRIES, KEEP_REQUESTS
from cadenza.policies.sharing.state.settings import Turns
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate
from cadenza.slurm_plugin.service.store import record_codec

ORDERINGS = [entry.name for entry in ENTRIES if entry.kind == "ordering"]
ALLOCATIONS = [entry.name for entry in ENTRIES if entry.kind == "allocation"]
GUARANTEED = {"proportional", "tune", "opt", "cadenza"}
"""Allocations that promise every scheduled job at least its proportional throughput; ``tune-coded`` clips demands that
no server has and counts only their CPUs."""
PLACES_ALL = {"proportional", "tune", "tune-coded", "opt", "cadenza"}
"""Allocations that run every runnable job, on which the bound on waiting rests."""
ROUND_S = 300.0
BOUND_S = 3000.0
EPSILON = 1e-9


def _cluster(rng: Random) -> tuple[Node, ...]:
    kinds = [rng.choice(KINDS[:4]) for _ in range(2)]
    return tuple(
        Node(f"n{number}", f"n{number}", 0, cpus, memory_gb * 1024, gpus, partitions=(PARTITION,))
        for number, (gpus, cpus, memory_gb) in enumerate(kinds)
    )


def _profile(rng: Random, name: str) -> Profile:
    """Return a monotone profile with noise, 1 at the reference's proportional share."""
    cpus, memory = (1.0, 2.0, 3.0, 6.0, 12.0), (20.83, 62.5, 125.0)
    steps = [0.3, 0.7, 1.0, 1.0 + rng.random(), 2.0 + rng.random()]
    rows = tuple(
        tuple(step * column * (1.0 if (step, column) == (1.0, 1.0) else rng.uniform(0.98, 1.02)) for column in columns)
        for step in steps
        for columns in [(rng.choice([0.1, 1.0]), 1.0, 1.0 + rng.choice([0.0, 0.3]))]
    )
    return Profile(name, 1.0, cpus, memory, rows)


def _trace(rng: Random, gpus: int, count: int = 8) -> list[TraceJob]:
    pool = [_profile(rng, f"m{number}") for number in range(3)]
    return [
        TraceJob(
            number,
            float(rng.randrange(0, 2000)),
            min(rng.choice([1, 1, 1, 2, 4, 8]), gpus),
            float(rng.randrange(200, 4000)),
            profile=rng.choice([*pool, None]),
            user=rng.choice(["alice", "bob"]),
            account=rng.choice(["a", "b"]),
        )
        for number in range(count)
    ]


@dataclass
class Watch:
    """A policy whose every decision is checked."""

    policy: Policy
    check: Callable[[ClusterSnapshot, Memory, Decision], None]

    def watched(self) -> Policy:
        def decide(snapshot: ClusterSnapshot, memory: Memory) -> Decision:
            decision = self.policy.decide(snapshot, memory)
            try:
                self.check(snapshot, memory, decision)
            except AssertionError as error:
                pytest.fail(f"at {snapshot.time_s:.0f} s: {error}")  # no Exception: the round does not catch it
            return decision

        return replace(self.policy, decide=decide)


def _names(snapshot: ClusterSnapshot) -> dict[str, Server]:
    return {
        node.name: Server(node.name, node.gpus, node.cpus, node.memory_mb, node.gpu_type) for node in snapshot.nodes
    }


def _fair(profile: Profile | None, placement: Placement, servers: dict[str, Server]) -> float:
    return min(
        share_speed(profile, proportional_share(servers[share.node], share.gpus), servers[share.node].gpu_type)
        for share in placement
    )


def _check_jobs(snapshot: ClusterSnapshot, *, guaranteed: bool) -> None:
    """Gangs are whole, and no job is slower than at the proportional share; ``World.check`` sees to capacity."""
    servers = _names(snapshot)
    types = {name: server.gpu_type for name, server in servers.items()}
    for job in snapshot.jobs:
        if job.state == "RUNNING":
            assert sum(share.gpus for share in job.placement) == job.gpus
            assert len({share.node for share in job.placement}) == len(job.placement)
            if guaranteed:
                speed = placement_speed(job.profile, job.placement, types)
                assert speed >= _fair(job.profile, job.placement, servers) - EPSILON, job


def _check_permutation(policy: Policy, snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
    turned = replace(snapshot, jobs=snapshot.jobs[::-1], nodes=snapshot.nodes[::-1])
    assert record_codec.encode_decision(policy.decide(turned, memory)) == record_codec.encode_decision(decision)


def _check_replay(policy: Policy, snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
    assert record_codec.decode_memory(record_codec.encode_memory(decision.memory)) == decision.memory
    stored = record_codec.decode_snapshot(record_codec.encode_snapshot(snapshot))
    assert record_codec.encode_decision(policy.decide(stored, memory)) == record_codec.encode_decision(decision)


def _check_waits(snapshot: ClusterSnapshot, count: int) -> None:
    """A job past the bound is only behind others past it, each of which gets a round before the next."""
    for job in snapshot.jobs:
        progress = job.progress
        if progress is not None and not progress.running:
            since_s = progress.ran_s if progress.ran_s is not None else job.submit_s
            assert snapshot.time_s - since_s <= BOUND_S + (count + 1) * ROUND_S, job


@pytest.mark.parametrize("allocate", [name for name in ALLOCATIONS if name != KEEP_REQUESTS])
@pytest.mark.parametrize("order", ORDERINGS)
def test_invariants(order: str, allocate: str) -> None:
    rng = Random(f"{order} {allocate}")  # noqa: S311
    nodes = _cluster(rng)
    jobs = _trace(rng, sum(node.gpus for node in nodes))
    settings = PolicySettings(partitions=frozenset({PARTITION}), starvation_s=BOUND_S)
    policy = build(order, allocate, "none", settings)
    rounds = 0

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        nonlocal rounds
        rounds += 1
        _check_jobs(snapshot, guaranteed=allocate in GUARANTEED)
        if rounds % 5 == 1:
            _check_permutation(policy, snapshot, memory, decision)
            _check_replay(policy, snapshot, memory, decision)
        if order != "fifo" and allocate in PLACES_ALL:
            _check_waits(snapshot, len(jobs))

    result = simulate(jobs, nodes, Watch(policy, check).watched(), Setup(round_s=ROUND_S))
    assert not result.unfinished
    assert rounds >= 3


SHARED = [
    (share, order, ALLOCATIONS[(number * 3 + offset) % len(ALLOCATIONS)], "fair")
    for offset, share in enumerate(("timeslice", "gandiva"))
    for number, order in enumerate(ORDERINGS)
] + [("timeslice" if number % 2 else "gandiva", order, "cadenza", "order") for number, order in enumerate(ORDERINGS)]
"""Every sharing with every ordering, each allocation twice: under sharing an allocation divides one host at a time.

Turns by the ordering with each ordering.
"""


@pytest.mark.parametrize(("share", "order", "allocate", "turns"), SHARED)
def test_invariants_under_sharing(share: str, order: str, allocate: str, turns: Turns) -> None:
    """Besides these the simulator checks every round that no host, lane or GPU is given out twice."""
    rng = Random(f"{share} {order} {allocate}")  # noqa: S311
    hosts = [replace(node, gpu_memory_gb=24.0) for node in _cluster(rng)]
    names = [(node, lane, f"{node.name}-l{lane}" if lane else node.name) for node in hosts for lane in range(3)]
    lanes = [replace(node, name=name, lane=lane) for node, lane, name in names]
    jobs = _trace(rng, max(node.gpus for node in hosts), 12)
    settings = PolicySettings(partitions=frozenset({PARTITION}))
    settings = replace(settings, sharing=replace(settings.sharing, turns=turns))
    policy = build(order, allocate, share, settings)
    rounds = 0

    def check(snapshot: ClusterSnapshot, memory: Memory, decision: Decision) -> None:
        nonlocal rounds
        rounds += 1
        _check_jobs(snapshot, guaranteed=False)
        if rounds % 20 == 1:
            _check_permutation(policy, snapshot, memory, decision)
            _check_replay(policy, snapshot, memory, decision)

    setup = Setup(round_s=60.0, lanes=3, rounds_on_events=True)
    result = simulate(jobs, tuple(lanes), Watch(policy, check).watched(), setup)
    assert not result.unfinished
    assert rounds >= 10
