"""A search over configurations on four GPUs (Gandiva, OSDI'18, p. 606, Table 3): first come first served, or shared.

374 learning curves are generated as the workload ``automl`` states; one reaches the target. First come first served
gives each configuration a GPU until its last epoch. With sharing the search looks at every curve once an epoch: after
``FIRST`` epochs (about the paper's 1,000 mini-batches) it fits the curve's law, stops configurations predicted below
30 %, lets the best ``TOP`` keep their GPUs (a higher priority, the paper's top-M), and puts off the others while
others have not been looked at; those come back by their prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from random import Random

from cadenza.policies.allocation.proportional import proportional
from cadenza.policies.composition import Policy, PolicySettings, build
from cadenza.policies.inputs.cluster import PARTITION, read_cluster
from cadenza.policies.inputs.interference import packing_pairs
from cadenza.policies.inputs.published import gandiva_table1
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.ordering.ranking import Queue, Ranking
from cadenza.policies.round import run_round
from cadenza.policies.sharing.pipeline import Pipeline, stages_of
from cadenza.policies.sharing.state.settings import GandivaSettings, SharingSettings
from cadenza.policies.simulator.job import SimJob
from cadenza.policies.simulator.run_values import GUARD, Setup
from cadenza.policies.simulator.sim_gateway import RunStore, SimClock, SimGateway
from cadenza.policies.simulator.simulation import simulate
from cadenza.policies.simulator.workloads.automl import (
    Curve,
    generate_curves,
    lenet_profile,
    place_target,
    search_jobs,
)
from cadenza.policies.simulator.world import World

SHUFFLES = 20
CONFIGS, EPOCHS, EPOCH_S, TARGET = 374, 50, 36.0, 0.84
CLUSTER, LANES, ROUND_S = "1x4:12:448:P40", 8, 18.0
FIRST = 3
TOP = 2
POOR = 0.3
GUESS = 0.1
GRID = [(tau / 4, beta / 4) for tau in range(2, 9) for beta in range(4, 9)]
"""Half-lives in epochs and exponents that the fit tries."""
SHARING = SharingSettings(
    enforce=True,
    place=True,
    partitions=frozenset({PARTITION}),
    share_between_users=True,
    max_priority=1,
    suspend=False,
)


def drive(trace: Sequence[TraceJob], nodes: str, policy: Policy, setup: Setup, each: Callable[[World], bool]) -> World:
    """Run rounds until ``each``, called before every one, returns True; return the world."""
    world = World(trace, read_cluster(nodes, setup.lanes), setup)
    gateway, clock, store = SimGateway(world), SimClock(world), RunStore()
    number = 0
    while not world.over:
        world.advance(number * setup.round_s)
        for job in world.live.values():
            job.settle(world.now_s)
        if each(world):
            break
        run_round(gateway, clock, store, policy.decide, GUARD)
        gateway.end_round()
        number += 1
    return world


def search_ratios(shuffles: Iterable[int]) -> tuple[list[float], list[tuple[float, float]]]:
    """Return for each shuffle how many times longer first come first served takes, and both times in minutes."""
    times = []
    for seed in shuffles:
        rng = Random(seed)
        curves = place_target(generate_curves(rng, CONFIGS, EPOCHS, TARGET), TARGET, rng.random())
        times.append((fifo_minutes(curves), Search(curves).minutes()))
    return [before / after for before, after in times], times


def fifo_minutes(curves: Sequence[Curve]) -> float:
    """Return the time to the target when every configuration runs to its end, in order."""
    jobs = search_jobs(curves, lenet_profile(), EPOCH_S)
    settings = PolicySettings(partitions=frozenset({PARTITION}))
    result = simulate(
        jobs, read_cluster(CLUSTER), build("fifo", "proportional", "none", settings), Setup(round_s=ROUND_S)
    )
    good = next(place for place, curve in enumerate(curves) if curve.reaches(TARGET) is not None)
    start_s = next(job.start_s for job in result.jobs if job.id == good) or 0.0
    return (start_s + (curves[good].reaches(TARGET) or 0) * EPOCH_S) / 60


@cache
def rises() -> list[list[float]]:
    """Return how far each law of ``GRID`` has risen after each epoch."""
    return [[1 - (1 + epoch / tau) ** -beta for epoch in range(1, EPOCHS + 1)] for tau, beta in GRID]


def predicted(points: Sequence[float]) -> float:
    """Return the accuracy that a curve ends with by the law that fits its points best (least squares)."""
    gains = [value - GUESS for value in points]
    best = (float("inf"), GUESS)
    for rise in rises():
        seen = rise[: len(gains)]
        height = sum(g * r for g, r in zip(gains, seen, strict=True)) / sum(r * r for r in seen)
        error = sum((g - height * r) ** 2 for g, r in zip(gains, seen, strict=True))
        best = min(best, (error, GUESS + height * rise[-1]))
    return best[1]


class Search:
    """One search with sharing."""

    def __init__(self, curves: Sequence[Curve]) -> None:
        self.curves = curves
        self.jobs = search_jobs(curves, lenet_profile(), EPOCH_S)
        self.looked: dict[int, tuple[int, float]] = {}
        """By configuration's place: epochs seen, and the final accuracy predicted from them."""
        self.found_s: float | None = None

    def minutes(self) -> float:
        """Return the time to the target."""
        pairs = packing_pairs({"lenet": lenet_profile()}, gandiva_table1())
        setup = Setup(round_s=ROUND_S, lanes=LANES, interference=pairs)
        settings, functions = SHARING, GandivaSettings()
        stages = stages_of("gandiva", settings, functions, allocates=True)
        policy = Policy("search", Pipeline(stages, settings, functions, self.order, proportional).decide)
        world = drive(self.jobs, CLUSTER, policy, setup, self.look)
        return (self.found_s if self.found_s is not None else world.now_s) / 60

    def order(self, queue: Queue) -> Ranking:
        """Rank configurations without a look first, then by prediction."""
        return Ranking(tuple(sorted(queue.jobs, key=lambda job: self._rank(job.key.id))))

    def _rank(self, place: int) -> tuple[bool, float, int]:
        seen = self.looked.get(place)
        return (False, 0.0, place) if seen is None else (True, -seen[1], place)

    def look(self, world: World) -> bool:
        """Predict, stop, prefer and put off; True when a configuration has reached the target."""
        for job in list(world.live.values()):
            if self._reached(job):
                self.found_s = world.now_s
                return True
            self._predict(job)
        for job in [job for job in world.live.values() if self._poor(job)]:
            world.cancel(job)
        self._prefer(list(world.live.values()))
        self._put_off(world)
        return False

    def _epochs(self, job: SimJob) -> int:
        return int(job.done_s / EPOCH_S + 1e-6)

    def _reached(self, job: SimJob) -> bool:
        seen = self.curves[job.key.id].points[: self._epochs(job)]
        return bool(seen) and max(seen) >= TARGET

    def _predict(self, job: SimJob) -> None:
        epochs = self._epochs(job)
        if epochs >= FIRST and self.looked.get(job.key.id, (0, 0.0))[0] != epochs:
            self.looked[job.key.id] = epochs, predicted(self.curves[job.key.id].points[:epochs])

    def _poor(self, job: SimJob) -> bool:
        return self.looked.get(job.key.id, (0, 1.0))[1] < POOR

    def _prefer(self, jobs: Sequence[SimJob]) -> None:
        ranked = sorted((j for j in jobs if j.key.id in self.looked), key=lambda job: self._rank(job.key.id))
        top = {job.key for job in ranked[:TOP]}
        for job in jobs:
            job.options = replace(job.options, priority=int(job.key in top))

    def _put_off(self, world: World) -> None:
        """Requeue those looked at that are not among the best while others wait to be looked at."""
        jobs = list(world.live.values())
        unseen = sum(job.state == "PENDING" and job.key.id not in self.looked for job in jobs)
        placed = [job for job in jobs if job.state != "PENDING" and job.key.id in self.looked]
        placed.sort(key=lambda job: self._rank(job.key.id))
        for job in placed[TOP:][::-1][:unseen]:
            world.requeue(job)
