"""Refines a running job's law from its telemetry at the CPUs that it happens to get, and notices a new phase (pure).

The belief over (T_gpu, P) is kept on a grid of their logarithms, so that an observation tells exactly as much as it
can: far from the knee it fixes one parameter and only bounds the other. A new phase (another augmentation, an
evaluation, a larger dataset) is flagged by the Page-Hinkley test (Page, "Continuous inspection schemes", Biometrika
1954) on how far the observations lie from what was expected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cadenza.profiler.law import Law

Floats = NDArray[np.float64]

CELLS = 121
WIDTH = 1.5
"""Half width of the grid in natural logarithms: a factor of 4.5 either way."""
PRIOR = 0.5
"""Standard deviation of the prior around a first guess, in logarithms."""
MODEL_ERROR = 0.03
"""What the law itself misses, in logarithms; it is added to an observation's own error."""
FORGET = 0.995
"""Weight that the past keeps with each observation, so that slow drift is followed."""
SLACK = 0.5
"""Page-Hinkley: standard deviations of shift that do not count."""
ALARM = 10.0
"""Page-Hinkley: standard deviations, summed, at which a new phase is flagged."""
MOST_SHIFT = 4.0
"""One observation counts at most so many standard deviations: three in a row make a phase, a single one does not."""


@dataclass(frozen=True, eq=False)
class Belief:
    """What is believed of one job's law after ``observations``; values, so that a policy can keep it."""

    centre: Law
    log_weights: Floats
    """Logarithm of the density at each (T_gpu, P) of the grid around the centre, not normalised."""
    observations: int = 0
    slower: float = 0.0
    faster: float = 0.0
    """Page-Hinkley sums of either side."""
    phase: int = 0
    """How many new phases were flagged."""

    @cached_property
    def weights(self) -> Floats:
        """Return the probabilities of the grid's cells."""
        raw = np.exp(self.log_weights - self.log_weights.max())
        return np.asarray(raw / raw.sum())

    @property
    def law(self) -> Law:
        """Return the expected law (geometric means)."""
        gpu, work = _axes(self.centre)
        return Law(float(np.exp(self.weights.sum(axis=1) @ gpu)), float(np.exp(self.weights.sum(axis=0) @ work)))

    def time_s(self, cpus: float) -> tuple[float, float]:
        """Return a step's expected time with CPUs for each GPU, and its relative standard deviation."""
        times = _log_times(self.centre, cpus)
        mean = float((self.weights * times).sum())
        return float(np.exp(mean)), float(np.sqrt((self.weights * (times - mean) ** 2).sum()))

    def unsure(self, cpus: float) -> float:
        """Return half of the 95 % interval of a step's time, relative to it: 0.1 is 10 %."""
        return 1.96 * self.time_s(cpus)[1]


def begin(law: Law, spread: float = PRIOR) -> Belief:
    """Return the belief before any observation: an offline profile with a small spread, or a guess with a large one."""
    steps = np.linspace(-WIDTH, WIDTH, CELLS)
    one = -0.5 * (steps / spread) ** 2
    return Belief(law, one[:, None] + one[None, :])


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
    away = float(np.clip(np.log(iteration_s / expected) / np.hypot(noise, spread), -MOST_SHIFT, MOST_SHIFT))
    slower, faster = max(0.0, belief.slower + away - SLACK), max(0.0, belief.faster - away - SLACK)
    if max(slower, faster) >= ALARM:
        scale = iteration_s / expected
        fresh = begin(Law(belief.law.gpu_s * scale, belief.law.work_s * scale))
        return _learn(replace(fresh, phase=belief.phase + 1), cpus, iteration_s, noise)
    return _learn(replace(belief, slower=slower, faster=faster), cpus, iteration_s, noise)


def _learn(belief: Belief, cpus: float, iteration_s: float, noise: float) -> Belief:
    """Weigh the grid by how likely the observation is; recentre it when the belief has moved to its edge."""
    away = (np.log(iteration_s) - _log_times(belief.centre, cpus)) / noise
    learnt = replace(
        belief, log_weights=FORGET * belief.log_weights - 0.5 * away**2, observations=belief.observations + 1
    )
    found, centre = learnt.law, learnt.centre
    moved = max(abs(np.log(found.gpu_s / centre.gpu_s)), abs(np.log(found.work_s / centre.work_s)))
    return _recentred(learnt) if moved > WIDTH / 2 else learnt


def _recentred(belief: Belief) -> Belief:
    """Return the belief on a grid around its mean, as a normal one of the same spread."""
    gpu, work = _axes(belief.centre)
    law = belief.law
    spreads = [
        float(np.sqrt(belief.weights.sum(axis=axis) @ (values - np.log(mean)) ** 2))
        for axis, values, mean in ((1, gpu, law.gpu_s), (0, work, law.work_s))
    ]
    steps = np.linspace(-WIDTH, WIDTH, CELLS)
    one, two = (-0.5 * (steps / max(spread, WIDTH / CELLS)) ** 2 for spread in spreads)
    return replace(belief, centre=law, log_weights=one[:, None] + two[None, :])


def _axes(centre: Law) -> tuple[Floats, Floats]:
    """Return the logarithms of T_gpu and P along the grid."""
    steps = np.linspace(-WIDTH, WIDTH, CELLS)
    return np.log(centre.gpu_s) + steps, np.log(centre.work_s) + steps


def _log_times(centre: Law, cpus: float) -> Floats:
    """Return the logarithm of a step's time in each cell."""
    gpu, work = _axes(centre)
    return np.asarray(np.maximum(gpu[:, None], work[None, :] - np.log(cpus)))
