"""From measured points to a profile, and to what it says in words (pure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cadenza.policies.core.profile import Profile, Reference
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.measure.point import STOLEN
from cadenza.profiler.model.memory import PARTS, Data
from cadenza.profiler.model.roofline import Law, fit, predict, worst_error

ENOUGH = 0.03
"""Times within 3 % of the fastest count as equal to it."""
SPARE_MEMORY = 1.2
"""Memory to ask for, over what was seen in use."""


@dataclass(frozen=True)
class Subject:
    """The subject of a measurement: its name, GPUs here, the server of its share, and its data."""

    model: str
    gpus: int
    reference: Reference
    gpu_type: str = ""
    task: str = ""
    data: Data | None = None

    @property
    def share(self) -> float:
        """Return the CPUs for each GPU of the proportional share."""
        return self.reference.cpus / self.reference.gpus


@dataclass(frozen=True)
class Finding:
    """A profile with the law behind it; ``times`` are measured seconds a step by CPUs for each GPU."""

    subject: Subject
    profile: Profile
    law: Law
    times: dict[float, float]
    notes: tuple[str, ...]

    @property
    def error(self) -> float:
        """Return the law's largest relative error at the measured points."""
        return worst_error(self.law, self.times)

    @property
    def law_text(self) -> str:
        """Return the law and its error as text."""
        law = self.law
        return (
            f"T(c) = max(T_gpu, P/c) with T_gpu = {law.gpu_s * 1000:.1f} ms and P = {law.work_s * 1000:.1f} CPU-ms for "
            f"each GPU; largest error at the {len(self.times)} measured points {self.error:.1%}"
        )

    def cached_s(self, cache_gb: float) -> float | None:
        """Return a step's computed time with so much cache and the most CPUs; None where the data are not known."""
        data = self.subject.data
        return None if data is None else data.time_s(self.time_s(max(self.times)), data.base_gb + cache_gb)

    def time_s(self, cpus: float) -> float:
        """Return a step's predicted time with CPUs for each GPU and all memory."""
        return predict(self.law, self.times, cpus)


def conclude(state: State, grid: Sequence[float], subject: Subject) -> Finding:
    """Return the profile of what was measured; ``grid`` are the job's CPUs at which it is to be known."""
    gpus = subject.gpus
    points = state.measured()
    times = {point.cpus / gpus: point.iteration_s for point in points}
    law = fit(times)
    cpus = sorted({*(each / gpus for each in grid), subject.share})
    steps = {each: predict(law, times, each) for each in cpus}
    share_gb, data = subject.reference.memory_gb / subject.reference.gpus, subject.data
    if data is None:  # one point of memory
        memory = [min(max(point.memory_gb for point in state.points) * SPARE_MEMORY / gpus, share_gb)]
    else:
        axis = {data.memory_gb(part) / gpus for part in PARTS}
        memory = sorted({*axis, share_gb} if min(axis) < share_gb else axis)
    matrix = [[_time(subject, steps[each], gb) for gb in memory] for each in cpus]
    # A job may leave CPUs idle, so what it can do with fewer it can do with more.
    faster = list(accumulate(matrix, lambda row, more: [min(pair) for pair in zip(row, more, strict=True)]))
    unit = min(_time(subject, steps[each], share_gb) for each in cpus if each <= subject.share)
    best = max(points, key=lambda point: point.cpus)
    profile = Profile(
        model=subject.model,
        iteration_s=unit,
        cpus_per_gpu=tuple(cpus),
        memory_gb_per_gpu=tuple(memory),
        throughput=tuple(tuple(unit / seconds for seconds in row) for row in faster),
        reference=subject.reference,
        gpu=subject.gpu_type,
        task=subject.task,
        storage_mb_s=()
        if data is None
        else tuple(tuple(data.bandwidth_mb_s(steps[each], gb * gpus) for gb in memory) for each in cpus),
        gpu_memory_peak_gb=best.gpu_peak_gb,
        gpu_memory_low_gb=best.gpu_low_gb,
        gpu_utilization=best.gpu_utilization,
    )
    return Finding(subject, profile, law, times, tuple(_notes(state, subject, times, law)))


def _time(subject: Subject, compute_s: float, memory_gb: float) -> float:
    """Return a step's time with memory for each GPU."""
    return compute_s if subject.data is None else subject.data.time_s(compute_s, memory_gb * subject.gpus)


def _notes(state: State, subject: Subject, times: dict[float, float], law: Law) -> list[str]:
    """Return the notes on the measurement for its reader."""
    notes = []
    loose = [f"{point.cpus:g}" for point in state.measured() if not point.settled]
    if loose:
        at = f"at {', '.join(loose)} CPUs"
        notes.append(f"{at} the time was over before the interval was narrow: other processes, or an uneven job")
    if (most := max(point.others for point in state.points)) > 1 / 2:
        notes.append(f"other processes used up to {most:.1f} CPUs at the same time")
    if (most := max(point.stolen for point in state.points)) > STOLEN:
        hint = "" if state.points[-1].turn else ": --set turns=8 measures the points in turns"
        notes.append(f"this virtual machine's host gave up to {most:.0%} of its CPU time to others{hint}")
    if not min(times) <= subject.share <= max(times):
        share = f"the proportional share, {subject.share:g} CPUs for each GPU,"
        notes.append(f"{share} was not within what was measured: the law says what it gives")
    if worst_error(law, times) > 0.1:  # noqa: PLR2004
        notes.append("the job does not follow the law: between measured points expect errors of its size")
    if subject.data is None:
        notes.append("the memory axis is one point: give --dataset to have it computed")
    if all(point.gpu_peak_gb is None for point in state.points):
        notes.append("GPU memory and utilization are not known: no GPU was in use")
    return notes


def best_cpus(finding: Finding) -> float:
    """Return the fewest CPUs for each GPU that are as good as the most."""
    fastest = min(finding.time_s(cpus) for cpus in finding.profile.cpus_per_gpu)
    return next(cpus for cpus in finding.profile.cpus_per_gpu if finding.time_s(cpus) <= fastest * (1 + ENOUGH))


def best_memory_gb(finding: Finding) -> float:
    """Return the least memory for each GPU that is as good as the most, at the best CPUs."""
    profile = finding.profile
    row = profile.throughput[profile.cpus_per_gpu.index(best_cpus(finding))]
    found = zip(profile.memory_gb_per_gpu, row, strict=True)
    return next(gb for gb, speed in found if speed * (1 + ENOUGH) >= max(row))


def gain(finding: Finding) -> float:
    """Return how many times faster the best CPUs are than the proportional share."""
    return finding.time_s(finding.subject.share) / finding.time_s(best_cpus(finding))


def words(finding: Finding) -> str:
    """Return the finding as one sentence."""
    best, share, times = best_cpus(finding), finding.subject.share, gain(finding)
    plural = "CPU" if best == 1 else "CPUs"
    lead = f"with {best:g} {plural} per GPU"
    if best <= share:
        rest = f"; the other {share - best:g} of its share can serve other jobs" if best < share else ""
        return f"{lead}: as fast as with any more{rest}"
    limited = best >= max(finding.times) and finding.law.knee >= best * (1 - ENOUGH)
    more = f"more than {best:g} were not measured, and may help" if limited else "more buys nothing"
    return f"{lead}: {times:.1f}x faster than the proportional share ({share:g}); {more}"


def sbatch(finding: Finding) -> list[str]:
    """Return the lines for a batch script that starts the command as one task on one node."""
    gpus = finding.subject.gpus
    memory = math.ceil(best_memory_gb(finding) * gpus)
    return [
        f"#SBATCH --gpus-per-node={gpus}",
        f"#SBATCH --cpus-per-task={math.ceil(best_cpus(finding) * gpus - 1e-9)}",
        f"#SBATCH --mem={memory}G",
        f"#SBATCH --cadenza=model={finding.subject.model}",
    ]
