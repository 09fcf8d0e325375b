"""Learning curves for a search over configurations, as in Gandiva's AutoML runs (OSDI'18, p. 605, Table 3).

The paper searches 374 configurations of a LeNet-like network on CIFAR-10 for one of at least 84 % accuracy and does not
publish the curves. The generator assumes the following. A share ``poor`` (0.3)
hardly learns (10 to 30 % in the end), one configuration reaches the target, and the others end between 40 %
and 2 % below the target. Accuracy rises from 10 %, that of guessing, by ``final - (final - 0.1) (1 + e/τ)^-β`` after e
epochs, with τ from 0.5 to 2 epochs and β from 1 to 2, and noise of 0.5 % either way at each epoch. A full run takes 50
epochs of 36 s on a P40: Table 3's first-come-first-served search needs about 30 minutes of a GPU for a configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.workloads.spec import Draws

GUESS = 0.1
NOISE = 0.005
OVER = 0.02
"""Final accuracy of the good configuration above the target."""
BATCHES = 391
"""Mini-batches an epoch: 50,000 images in batches of 128."""


@dataclass(frozen=True, slots=True)
class Curve:
    """The accuracy of one configuration after each epoch, from 0 to 1."""

    config: int
    points: tuple[float, ...]

    def reaches(self, target: float) -> int | None:
        """Return the first epoch after which the accuracy is at least ``target``, or None."""
        return next((epoch for epoch, value in enumerate(self.points, 1) if value >= target), None)


def generate_curves(
    rng: Draws, configs: int = 374, epochs: int = 50, target: float = 0.84, *, poor: float = 0.3
) -> tuple[Curve, ...]:
    """Return the curves of a search in random order, exactly one of which reaches ``target``; see this module."""
    best = rng.randrange(configs)
    return tuple(_curve(rng, number, epochs, target, good=number == best, poor=poor) for number in range(configs))


def _curve(rng: Draws, number: int, epochs: int, target: float, *, good: bool, poor: float) -> Curve:
    draw = rng.random()
    final = rng.uniform(GUESS, 0.3) if draw < poor else rng.uniform(0.4, target - 0.02)
    tau, beta = rng.uniform(0.5, 2.0), rng.uniform(1.0, 2.0)
    rise = [final - (final - GUESS) * (1 + epoch / tau) ** -beta for epoch in range(1, epochs + 1)]
    noisy = [min(max(value + rng.uniform(-NOISE, NOISE), 0.0), target - NOISE) for value in rise]
    if not good:
        return Curve(number, tuple(noisy))
    top = min(target + OVER, 1.0)
    share = [1 - (1 + epoch / tau) ** -beta for epoch in range(1, epochs + 1)]
    return Curve(number, tuple(GUESS + (top - GUESS) * value / share[-1] for value in share))


def place_target(curves: Sequence[Curve], target: float, at: float) -> tuple[Curve, ...]:
    """Return the curves with the first of those that reach ``target`` moved to a share ``at`` of the list.

    Table 3's rows are searches with the target at 25, 50, 75 and 98 % of the list. Raise InputError when none
    reaches the target.
    """
    good = next((curve for curve in curves if curve.reaches(target) is not None), None)
    if good is None:
        raise InputError(f"learning curves: none of {len(curves)} reaches {target:g}")
    others = [curve for curve in curves if curve is not good]
    position = min(round(at * len(curves)), len(others))
    return (*others[:position], good, *others[position:])


def search_jobs(curves: Iterable[Curve], profile: Profile, epoch_s: float = 36.0) -> tuple[TraceJob, ...]:
    """Return one job of one GPU for each configuration, all submitted at 0, each for all its epochs.

    A job's id is its place in the search; the tag ``config`` is its configuration.
    """
    return tuple(
        TraceJob(
            id=place,
            submit_s=0.0,
            gpus=1,
            work_s=epoch_s * len(curve.points),
            model=profile.model,
            profile=profile,
            iterations=BATCHES * len(curve.points),
            tags={"config": str(curve.config)},
        )
        for place, curve in enumerate(curves)
    )


@dataclass(frozen=True, slots=True)
class Search:
    """Parameters of the workload generator; ``at`` is the target's place in the list, from 0 to 1."""

    configs: int
    epochs: int
    epoch_s: float
    target: float
    at: float

    def generate(self, rng: Draws, profiles: Mapping[str, Profile]) -> tuple[TraceJob, ...]:
        """Return the whole search as jobs that run to their ends."""
        curves = place_target(generate_curves(rng, self.configs, self.epochs, self.target), self.target, self.at)
        return search_jobs(curves, next(iter(profiles.values())), self.epoch_s)


@cache
def lenet_profile() -> Profile:
    """Return the profile of the search's network: small, and alone on a GPU it keeps it busy for half the time."""
    return Profile(
        model="lenet",
        iteration_s=36.0 / BATCHES,
        cpus_per_gpu=(3.0,),
        memory_gb_per_gpu=(16.0,),
        throughput=((1.0,),),
        gpu_memory_peak_gb=1.0,
        gpu_memory_low_gb=0.05,
        gpu_utilization=0.5,
    )
