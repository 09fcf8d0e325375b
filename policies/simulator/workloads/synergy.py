"""Synergy's published workload generator (OSDI'22, §5; msr-fiddle/synergy, ``simulator/jobs``), draw for draw."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log

from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.model_mix import ModelMix
from cadenza.policies.inputs.trace import TraceJob
from cadenza.policies.simulator.workloads.spec import Draws

MEAN_JOB_H = (0.2 * (1e4 - 1e3) / 1.0 + 0.8 * (1e3 - 10**1.5) / 1.5) / log(10) / 60
"""Mean run time at the proportional share, hours: 16.77."""
LONG = 0.8
"""A draw from here on makes a long job."""
UNUSED = 9
"""The published code draws a model's number from 0 to this for each job and drops it."""


@dataclass(frozen=True, slots=True)
class Synergy:
    """Parameters of the generator: ``load`` in jobs an hour, ``synthetic`` for the 1, 2, 4, 8-GPU mix."""

    load: float
    jobs: int
    mix: ModelMix
    synthetic: bool = False

    def generate(self, rng: Draws, profiles: Mapping[str, Profile]) -> tuple[TraceJob, ...]:
        """Return the jobs, numbered from 0 in order of submission.

        One GPU a job: all durations are drawn first, then the arrivals, as when the published code takes them
        from its job list, so that one seed gives the same jobs at every load. Mixed GPU counts: arrival, duration
        and GPUs are drawn job by job, as its synthetic mode does. ``iterations`` is the duration over the model's
        ``iteration_s``, rounded down, and the work is that many iterations. Times in whole seconds.
        """
        draws = list(_mixed(rng, self.jobs) if self.synthetic else _single(rng, self.jobs))
        arrivals = accumulate(ceil(-log(1.0 - u) / self.load * 3600) for u, _, _ in draws)
        models = self.mix.models()
        return tuple(
            _job(number, arrival, gpus, duration_s, profiles[next(models)])
            for number, (arrival, (_, duration_s, gpus)) in enumerate(zip(arrivals, draws, strict=True))
        )


def _single(rng: Draws, jobs: int) -> Iterator[tuple[float, float, int]]:
    """Yield each job's arrival draw, duration and GPUs, for jobs of one GPU."""
    for duration_s in [_duration_s(rng) for _ in range(jobs)]:
        u = rng.random()
        rng.randint(0, UNUSED)
        yield u, duration_s, 1


def _mixed(rng: Draws, jobs: int) -> Iterator[tuple[float, float, int]]:
    """Yield the same for jobs of 1, 2, 4 and 8 GPUs: 70, 10, 15 and 5 % of them."""
    for _ in range(jobs):
        u = rng.random()
        duration_s = _duration_s(rng)
        gpus = _gpus(rng.uniform(0, 1))
        rng.randint(0, UNUSED)
        yield u, duration_s, gpus


def _duration_s(rng: Draws) -> float:
    """Draw a run time at the proportional share: long with probability 0.2, else 32 to 1,000 minutes."""
    exponents = (3, 4) if rng.random() >= LONG else (1.5, 3)
    return float(60 * 10 ** rng.uniform(*exponents))


def _gpus(draw: float) -> int:
    """Return the GPUs of a job.

    >>> [_gpus(draw) for draw in (0.69, 0.7, 0.8, 0.95)]
    [1, 2, 4, 8]
    """
    return next(gpus for least, gpus in ((0.95, 8), (0.8, 4), (0.7, 2), (0.0, 1)) if draw >= least)


def _job(number: int, arrival: int, gpus: int, duration_s: float, profile: Profile) -> TraceJob:
    iterations = int(duration_s / profile.iteration_s)
    return TraceJob(
        id=number,
        submit_s=float(arrival),
        gpus=gpus,
        work_s=iterations * profile.iteration_s,
        model=profile.model,
        profile=profile,
        iterations=iterations,
    )
