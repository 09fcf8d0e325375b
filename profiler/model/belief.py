"""Refines a running job's law from its telemetry at the CPUs that it happens to get, and notices a new phase (pure).

The belief over (T_gpu, P) is kept on a grid of their logarithms, so that an observation tells exactly as much as it
can: far from the knee it fixes one parameter and only bounds the other. A new phase (another augmentation, an
evaluation, a larger dataset) is flagged by the Page-Hinkley test (Page, "Continuous inspection schemes", Biometrika
1954) on how far the observations lie from what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cadenza.profiler.model.roofline import Law

Floats = NDArray[np.float64]

CELLS = 121
WIDTH = 1.5
"""Half width of the grid in natural logarithms: a factor of 4.5 either way."""
PRIOR = 0.5
"""Standard deviation of the prior around a first guess, in logarithms."""
MODEL_ERROR = 0.03
"""Error of the law itself, in logarithms; it is added to an observation's own error."""
FORGET = 0.995
"""Weight that the past keeps with each observation, so that slow drift is followed."""
SLACK = 0.5
"""Page-Hinkley: standard deviations of shift that do not count."""
ALARM = 10.0
"""Page-Hinkley: standard deviations, summed, at which a new phase is flagged."""
MAX_SHIFT = 4.0
"""One observation counts at most so many standard deviations: three in a row make a phase, a single one does not."""
SAME_CPUS = 0.02
"""Numbers of CPUs that are nearer than this part count as one."""
MAX_CPU_NUMBERS = 32
"""Numbers of CPUs that are remembered, those of which most is known."""


class Seen(NamedTuple):
    """All observations at one number of CPUs, as far as they are remembered."""

    cpus: float
    precision: float
    """Sum of the inverse squared errors."""
    log_s: float
    """Mean logarithm of a step's time, weighted by these."""


@dataclass(frozen=True)
class Belief:
    """Belief about one job's law after ``observations``; small values, so that a store can keep it.

    The density over (T_gpu, P) follows from a normal prior around a law and from what was seen at each number of CPUs.
    """

    prior: Law
    spread: float
    """Standard deviation of the prior, in logarithms."""
    center: Law
    """Center of the grid."""
    trust: float = 1.0
    """Weight that the prior still has."""
    seen: tuple[Seen, ...] = ()
    """Ascending."""
    observations: int = 0
    slower: float = 0.0
    faster: float = 0.0
    """Page-Hinkley sums of either side."""
    phase: int = 0
    """Number of new phases that were flagged."""

    @cached_property
    def weights(self) -> Floats:
        """Return the probabilities of the grid's cells."""
        gpu, work = _axes(self.center)
        one, two = (gpu - np.log(self.prior.gpu_s)) / self.spread, (work - np.log(self.prior.work_s)) / self.spread
        raw = -0.5 * self.trust * (one[:, None] ** 2 + two[None, :] ** 2)
        for seen in self.seen:
            raw = raw - 0.5 * seen.precision * (seen.log_s - _log_times(self.center, seen.cpus)) ** 2
        raw = np.exp(raw - raw.max())
        return np.asarray(raw / raw.sum())

    @cached_property
    def law(self) -> Law:
        """Return the expected law (geometric means)."""
        gpu, work = _axes(self.center)
        return Law(float(np.exp(self.weights.sum(axis=1) @ gpu)), float(np.exp(self.weights.sum(axis=0) @ work)))

    def time_s(self, cpus: float) -> tuple[float, float]:
        """Return a step's expected time with CPUs for each GPU, and its relative standard deviation."""
        times = _log_times(self.center, cpus)
        mean = float((self.weights * times).sum())
        return float(np.exp(mean)), float(np.sqrt((self.weights * (times - mean) ** 2).sum()))

    def unsure(self, cpus: float) -> float:
        """Return half of the 95 % interval of a step's time, relative to it: 0.1 is 10 %."""
        return 1.96 * self.time_s(cpus)[1]


def begin(law: Law, spread: float = PRIOR) -> Belief:
    """Return the belief before any observation: an offline profile with a small spread, or a guess with a large one."""
    return Belief(law, spread, law)


def guess(cpus: float, iteration_s: float) -> Belief:
    """Return the belief from a single observation: the knee is somewhere about."""
    return begin(Law(iteration_s, iteration_s * cpus), 1.0)


def observe(belief: Belief, cpus: float, iteration_s: float, error: float = 0.0) -> Belief:
    """Return the belief after a mean step of ``iteration_s`` with CPUs for each GPU.

    ``error`` is the observation's relative standard error. When it makes a new phase, ``phase`` is one higher and
    the belief begins anew around the observation, with the old ratio of P to T_gpu as a guess.
    """
    noise = float(np.hypot(error, MODEL_ERROR))
    expected, spread = belief.time_s(cpus)
    away = float(np.clip(np.log(iteration_s / expected) / np.hypot(noise, spread), -MAX_SHIFT, MAX_SHIFT))
    slower, faster = max(0.0, belief.slower + away - SLACK), max(0.0, belief.faster - away - SLACK)
    if max(slower, faster) >= ALARM:
        scale = iteration_s / expected
        fresh = begin(Law(belief.law.gpu_s * scale, belief.law.work_s * scale))
        return _learn(replace(fresh, phase=belief.phase + 1), cpus, iteration_s, noise)
    return _learn(replace(belief, slower=slower, faster=faster), cpus, iteration_s, noise)


def _learn(belief: Belief, cpus: float, iteration_s: float, noise: float) -> Belief:
    """Add an observation to what was seen with as many CPUs; move the grid when the belief has come to its edge."""
    new = Seen(cpus, noise**-2, float(np.log(iteration_s)))
    past = [one._replace(precision=FORGET * one.precision) for one in belief.seen]
    same = next((one for one in past if abs(one.cpus / cpus - 1) < SAME_CPUS), None)
    if same is not None:
        past.remove(same)
        total = same.precision + new.precision
        new = Seen(same.cpus, total, (same.precision * same.log_s + new.precision * new.log_s) / total)
    kept = sorted(past, key=lambda one: -one.precision)[: MAX_CPU_NUMBERS - 1]
    learnt = replace(
        belief, trust=FORGET * belief.trust, seen=tuple(sorted([*kept, new])), observations=belief.observations + 1
    )
    found, center = learnt.law, learnt.center
    moved = max(abs(np.log(found.gpu_s / center.gpu_s)), abs(np.log(found.work_s / center.work_s)))
    return replace(learnt, center=found) if moved > WIDTH / 2 else learnt


def _axes(center: Law) -> tuple[Floats, Floats]:
    """Return the logarithms of T_gpu and P along the grid."""
    steps = np.linspace(-WIDTH, WIDTH, CELLS)
    return np.log(center.gpu_s) + steps, np.log(center.work_s) + steps


def _log_times(center: Law, cpus: float) -> Floats:
    """Return the logarithm of a step's time in each cell."""
    gpu, work = _axes(center)
    return np.asarray(np.maximum(gpu[:, None], work[None, :] - np.log(cpus)))
