"""The two-parameter law of a training step, T(c) = max(T_gpu, P/c): fitted to points, and read between them (pure).

The law reproduces Synergy's Figure 2a (Mohan et al., OSDI 2022): with c CPUs a step takes as long as its CPU work
divided among them, until the GPU is the slower of the two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Law(NamedTuple):
    """One job's parameters, for each GPU; ``work_s`` in CPU-seconds a step."""

    gpu_s: float
    work_s: float

    def time_s(self, cpus: float) -> float:
        """Return the time of one step with so many CPUs for each GPU."""
        return max(self.gpu_s, self.work_s / cpus)

    @property
    def knee(self) -> float:
        """Return the CPUs for each GPU from which on more buy nothing."""
        return self.work_s / self.gpu_s


def fit(times: Mapping[float, float]) -> Law:
    """Return the law with the least squared relative error over measured points (CPUs → seconds a step).

    Whichever point the knee lies behind, the points up to it are the CPU's and the others the GPU's, so that all
    splits can be tried and each has a closed answer: the geometric means. Where no point is the GPU's (or the
    CPU's), that parameter is only bounded, and the bound is taken: the fastest step seen, or the last point's work.
    """
    cpus = sorted(times)
    work = np.log([times[c] * c for c in cpus])
    step = np.log([times[c] for c in cpus])
    laws = []
    for split in range(len(cpus) + 1):
        work_s = float(np.exp(work[:split].mean())) if split else float(np.exp(work[0]))
        gpu_s = float(np.exp(step[split:].mean())) if split < len(cpus) else float(np.exp(step[-1]))
        laws.append(Law(gpu_s, work_s))
    return min(laws, key=lambda law: sum(np.log(law.time_s(cpus) / times[cpus]) ** 2 for cpus in times))


def worst_error(law: Law, times: Mapping[float, float]) -> float:
    """Return the largest relative error of the law at measured points: 0.03 is 3 %."""
    return max(abs(law.time_s(cpus) / seconds - 1) for cpus, seconds in times.items())


def predict(law: Law, times: Mapping[float, float], cpus: float) -> float:
    """Return a step's time with CPUs that need not have been measured.

    Measured points come back as they are. Between two of them the law says the shape, and what it misses at the
    two is passed on in proportion to the distance; beyond the first and last, as it is there.
    """
    known = sorted(times)
    missed = [times[c] / law.time_s(c) for c in known]
    at = bisect_left(known, cpus)
    if at == len(known):
        ratio = missed[-1]
    elif at == 0:
        ratio = missed[0]
    else:
        part = (cpus - known[at - 1]) / (known[at] - known[at - 1])
        ratio = missed[at - 1] + part * (missed[at] - missed[at - 1])
    return law.time_s(cpus) * ratio
