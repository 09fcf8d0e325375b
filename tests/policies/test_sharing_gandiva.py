"""Gandiva as a whole in the simulator: host states, memory, no starvation, and the same decision whatever the order."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from gandiva_rig import profile
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.costs import SimCosts
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.ordering.fifo import fifo
from cadenza.policies.ordering.srtf import srtf
from cadenza.policies.sharing.board.host import observe_hosts
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.simulator.run_values import Setup
from cadenza.policies.simulator.simulation import simulate

SHARING = SharingSettings(
    enforce=True, place=True, partitions=frozenset({PARTITION}), share_between_users=True, max_priority=1
)
LANES = 4
MODELS = {
    "low": profile(0.1, model="low"),
    "mid": profile(0.6, model="mid"),
    "high": profile(0.95, model="high"),
    "large": profile(0.5, 12.0, model="large", memory_gb_per_gpu=(40.0,)),
}
PAIRS = {(a, b): (0.9, 0.9) if "low" in (a, b) else (0.45, 0.45) for a in MODELS for b in MODELS}
SETUP = Setup(
    round_s=20.0,
    rounds_on_events=True,
    lanes=LANES,
    horizon_s=20_000.0,
    interference=PAIRS,
    costs=SimCosts(migrate_s=5.0),
)


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - a reproducible workload


def nodes(count: int = 2):
    return tuple(replace(lane, gpu_memory_gb=16.0) for lane in read_cluster(f"{count}x4:12:128", LANES))


def trace(rng: Random, count: int):
    for number in range(count):
        model = rng.choice(sorted(MODELS))
        elastic = rng.random() < 0.2
        yield TraceJob(
            id=number,
            submit_s=rng.uniform(0, 300),
            gpus=rng.choice((1, 1, 1, 2, 4)),
            work_s=rng.uniform(20, 400),
            model=model,
            profile=MODELS[model],
            iterations=rng.randint(100, 2000),
            user=rng.choice("ab"),
            min_gpus=1 if elastic else None,
            max_gpus=4 if elastic else None,
        )


class Watched:
    """The policy, and what must hold of every snapshot that it sees."""

    def __init__(self, gandiva: GandivaSettings, order=fifo, rng: Random | None = None) -> None:
        self.gandiva = gandiva
        self.order = order
        self.rng = rng
        self.actions: list[str] = []

    def __call__(self, snapshot, memory):
        for host in observe_hosts(snapshot, SHARING.manages, {}, floor=SHARING.floor).values():
            assert host.committed_mb <= host.memory_mb or len(host.residents) == 1
            assert all(use.gpus <= host.gpus for use in host.use.values())
        stages = stages_of("gandiva", SHARING, self.gandiva, allocates=True)
        pipeline = Pipeline(stages, SHARING, self.gandiva, self.order, proportional)
        found = pipeline.decide(snapshot, memory)
        if self.rng is not None:
            parts = {name: list(getattr(snapshot, name)) for name in ("jobs", "nodes", "hosts")}
            for part in parts.values():
                self.rng.shuffle(part)
            other = replace(snapshot, **{name: tuple(part) for name, part in parts.items()})
            assert pipeline.decide(other, memory) == found
        assert found.reasons.keys() == {job.key for job in snapshot.jobs}
        self.actions += [type(action).__name__ for action in found.actions]
        return found


def run(jobs, watched, setup=SETUP, count=2):
    return simulate(jobs, nodes(count), Policy("gandiva", watched), setup)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from((fifo, srtf)), st.booleans())
def test_every_job_ends_whatever_comes_and_input_order_changes_nothing(seed, order, introspective):
    rng = seeded(seed)
    watched = Watched(GandivaSettings(introspective=introspective, move_every_s=30.0, idle_s=20.0), order, rng)
    result = run(list(trace(rng, 24)), watched)
    assert result.unfinished == ()
    assert all(job.finish_s is not None for job in result.jobs)


def test_all_functions_act_in_a_busy_cluster():
    watched = Watched(GandivaSettings(move_every_s=30.0, idle_s=20.0, move_s=5.0))
    result = run(list(trace(seeded(7), 60)), watched)
    assert {"Place", "Yield", "Resume", "Pack", "Unpack", "Migrate", "Resize", "Tune", "Suspend"} <= set(
        watched.actions
    )
    assert result.counts.packs > result.counts.unpacks > 0


@pytest.mark.parametrize("name", ["pack", "migrate", "defrag", "elastic"])
def test_a_function_that_is_off_does_nothing(name):
    only = {"pack": "Pack", "elastic": "Resize"}
    rest = {other: False for other in ("pack", "migrate", "defrag", "elastic") if other != name}
    jobs = list(trace(seeded(3), 40))
    off = Watched(GandivaSettings(**{name: False}, move_every_s=30.0, idle_s=20.0, move_s=5.0))
    run(jobs, off)
    assert only.get(name) not in off.actions
    alone = Watched(GandivaSettings(**rest, move_every_s=30.0, idle_s=20.0, move_s=5.0))
    run(jobs, alone)
    assert set(alone.actions) & {"Pack", "Resize", "Migrate"} <= {only.get(name, "Migrate")}


def test_the_same_run_twice_is_the_same():
    jobs = list(trace(seeded(5), 30))
    one, other = (run(jobs, Watched(GandivaSettings())) for _ in range(2))
    assert one == other


def test_a_job_waits_at_most_so_many_turns():
    """Six jobs of one GPU on two GPUs of one host each get a third of a GPU within three slices."""
    jobs = [TraceJob(id=n, submit_s=0.0, gpus=1, work_s=600.0, model="high", profile=MODELS["high"]) for n in range(12)]
    result = run(jobs, Watched(GandivaSettings()), replace(SETUP, horizon_s=400.0), count=1)
    got = [job.attained_s for job in result.jobs]
    assert min(got) > 400.0 / 3 - 65.0
    assert max(got) < 400.0 / 3 + 65.0


FAST = Profile("fast", 1.0, (1.0, 3.0, 6.0), (1.0, 62.5), ((0.5, 0.5), (1.0, 1.0), (2.0, 2.0)), gpu_utilization=0.5)
SLOW = Profile("slow", 1.0, (1.0, 3.0), (1.0, 62.5), ((1.0, 1.0), (1.0, 1.0)), gpu_utilization=0.5)


def movers(rng: Random):
    """Jobs that differ in what CPUs do for them, ask for little memory, and start up for a while wherever they go."""
    for number in range(24):
        profile, elastic, work_s = rng.choice((FAST, SLOW)), rng.random() < 0.2, rng.uniform(10, 80)
        yield TraceJob(
            id=number,
            submit_s=rng.uniform(0, 60),
            gpus=rng.choice((1, 1, 1, 2, 4)),
            work_s=work_s,
            model=profile.model,
            profile=profile,
            iterations=int(work_s),
            memory_gb_per_gpu=1.0,
            min_gpus=1 if elastic else None,
            max_gpus=4 if elastic else None,
        )


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 10**6))
@example(13)
@example(333)
def test_those_who_have_gpus_are_given_no_more_cpus_than_there_are(seed):
    """The simulator refuses a round that does, whoever is placed and whoever moves in it."""
    sharing = replace(SHARING, slice_s=20.0)
    rules = PolicySettings(
        partitions=frozenset({PARTITION}), sharing=sharing, gandiva=GandivaSettings(pack=False, move_every_s=10.0)
    )
    costs = SimCosts(start_s=4.0, restart_s=4.0, migrate_s=4.0, resize_s=4.0)
    setup = Setup(round_s=2.0, rounds_on_events=True, lanes=2, costs=costs)
    policy = build("srtf", "cadenza", "gandiva", rules)
    result = simulate(list(movers(seeded(seed))), read_cluster("3x4:12:250", 2), policy, setup)
    assert result.unfinished == ()
