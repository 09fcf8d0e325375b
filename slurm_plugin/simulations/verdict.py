"""The verdict of a what-if: what is gained, from which part on, its price, who loses, what it rests on (pure)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any, NamedTuple

from cadenza.policies.simulator.figures import mean_and_half, mean_over
from cadenza.policies.simulator.run_values import JobResult
from cadenza.slurm_plugin.report.compare import MIN_JOBS, slices_by
from cadenza.slurm_plugin.report.page_model import Comparison, Run, Slice
from cadenza.slurm_plugin.report.units import HOUR_S, MINUTE_S, NARROW, about, count, number, percent, unit_of
from cadenza.slurm_plugin.simulations.runs import Point, WhatIf, main_part

LEAST_JOBS = 100
"""Jobs below which nothing is said: one long job would decide."""
MAX_ERROR = 0.3
"""Error of the simulated Slurm's mean wait, relative to the real one, above which there is no verdict."""
LITTLE_WAIT_S = MINUTE_S
"""Mean wait below which there is nothing to gain, and difference of two means that is no error."""
CLEAR, WORSE = 0.005, 0.05
"""Least gain that counts, and least loss of a class of jobs that is named."""
IDLE_ANYWAY = 0.5
"""Part of all waiting, while enough GPUs were idle, from which on it is the cause of a wait that was too short."""
LENGTHS = {
    "under 10 min": "under 10 min", "to 1 h": "of 10 min to 1 h", "to 10 h": "of 1 to 10 h", "longer": "above 10 h",
}  # fmt: skip
"""Classes of run times as a phrase after "jobs of 8 GPUs"."""
NAMED = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "all"}


class Effect(NamedTuple):
    """One part of jobs or users against Slurm; means over the draws, with half the 95 % interval of the change."""

    users: bool
    part: float
    wait_s: float
    change: float
    """Change of the mean completion time."""
    half: float | None
    """None for one draw."""
    moves: float
    moved_gpu_h: float
    """GPU hours that moves cost."""
    idle_gpu_h: float
    """GPU hours idle while jobs wait that fit."""
    doubt: float = 0.0
    """Half the interval, for one draw that of the main part."""

    @property
    def gains(self) -> bool:
        """Return True if the gain is clear of the draws."""
        return self.change + self.doubt < -CLEAR


class Verdict(NamedTuple):
    """Five lines, the first of which is the verdict; ``refused``: it says why there is none."""

    lines: tuple[str, ...]
    refused: bool
    effects: tuple[Effect, ...]
    groups: Mapping[str, tuple[Slice, ...]]
    """Completion times of accounts and of QOS, where there are several."""
    facts: Mapping[str, Any]
    """The same as figures, for --json."""


def verdict(found: WhatIf, comparison: Comparison) -> Verdict:
    """Return the verdict; Slurm's simulation is the comparison's baseline."""
    # 1. Facts: the effect of each part, the groups, and the error of the baseline.
    base = comparison.baseline.runs[0]
    effects = [_effect(point, base) for point in found.points]
    spread = max(effect.half or 0.0 for effect in effects)
    effects = [one._replace(doubt=one.half or (spread if 0 < one.part < 1 else 0.0)) for one in effects]
    by_id = {job.id: job for job in found.history.jobs}

    def by(name: str) -> Callable[[Run, JobResult], str]:
        return lambda _run, job: getattr(by_id[job.id], name) or "none"

    groups = {name: slices_by(comparison.results, by(name)) for name in ("account", "qos")}
    groups = {name: slices for name, slices in groups.items() if len(slices) > 1}
    was_s, slurm_s = mean_wait_s([found.past]), mean_wait_s([base])
    error = (slurm_s - was_s) / was_s if was_s else None
    jobs, users = _of(effects, users=False), _of(effects, users=True)
    part = main_part([effect.part for effect in effects if not effect.users])
    main = next(effect for effect in jobs if effect.part == part)
    # 2. Whether a verdict stands on them.
    few = len(by_id) < LEAST_JOBS
    refused = few or abs(slurm_s - was_s) > max(MAX_ERROR * was_s, LITTLE_WAIT_S)
    baseline = _baseline(was_s, slurm_s, refused=refused and not few)
    idle = f"Today {_gpu_hours(_idle_h(base), base)} are idle beside waiting jobs that would fit"
    if refused:
        lines: tuple[str, ...] = (
            f"Not usable yet: a verdict needs {LEAST_JOBS} jobs that ended, and there are {len(by_id)}."
            if few
            else f"No verdict: {baseline}",
            baseline if few else " ".join(_causes(found, slurm_s < was_s)),
            f"{idle}.",
        )
    else:
        label = next(point.label for point in found.points if (point.users, point.part) == main[:2])
        lines = (
            _headline(main, jobs, slurm_s, _losers(comparison, label)),
            _break_even(main, jobs, users),
            f"{idle}; then {_gpu_hours(main.idle_gpu_h, base)}. " + _price(main, base),
            _who(groups, comparison, label),
            baseline,
        )
    facts = {
        "text": [line.replace(NARROW, " ") for line in lines], "refused": refused, "error": error,
        "break_even": {
            "jobs": from_part(jobs), "users": from_part(users),
        },
        "idle_gpu_h": _idle_h(base), "parts": [effect._asdict() for effect in effects],
    }  # fmt: skip
    return Verdict(tuple(filter(None, lines)), refused, tuple(effects), groups, facts)


def mean_wait_s(runs: Sequence[Run]) -> float:
    """Return the mean time from submission to the first start, the same weight for each run."""
    waits = [[job.start_s - job.submit_s for job in run.jobs if job.start_s is not None] for run in runs]
    return fmean([fmean(row) for row in waits if row] or [0.0])


def _effect(point: Point, base: Run) -> Effect:
    slurm_h = base.summary.get("avg_jct_h") or 1.0
    changes = [run.summary.get("avg_jct_h", slurm_h) / slurm_h - 1 for run in point.runs]
    change, half = mean_and_half(changes)
    held_h = fmean([_held_h(run) for run in point.runs])
    return Effect(
        point.users, point.part, mean_wait_s(point.runs), change, half,
        fmean([run.summary.get("restarts", 0.0) for run in point.runs]), max(held_h - _held_h(base), 0.0),
        fmean([_idle_h(run) for run in point.runs]),
    )  # fmt: skip


def _held_h(run: Run) -> float:
    """Return the GPU hours that jobs held: in two runs of the same work only moves make a difference."""
    begin_s = run.samples[0].time_s if run.samples else run.end_s
    return mean_over(run.samples, lambda sample: sample.gpus_held, begin_s, run.end_s) * (run.end_s - begin_s) / HOUR_S


def _idle_h(run: Run) -> float:
    """Return the GPU hours idle while a job waits that fits, from the first to the last submission."""
    submits = [job.submit_s for job in run.jobs]
    return run.summary.get("idle_waiting_gpus", 0.0) * (max(submits) - min(submits)) / HOUR_S


def _price(main: Effect, base: Run) -> str:
    return f"{count(round(main.moves))} moves cost {_gpu_hours(main.moved_gpu_h, base)}."


def _gpu_hours(hours: float, base: Run) -> str:
    whole = _held_h(base)
    part = f" ({hours / whole:.1%} of the work)".replace("%", f"{NARROW}%") if whole else ""
    return f"{number(hours, 0)} GPU hours{part}"


# --- The sentences ---------------------------------------------------------------------------------------


def _headline(main: Effect, jobs: Sequence[Effect], slurm_s: float, losers: Sequence[str]) -> str:
    """Return the verdict itself."""
    whose = f"{NAMED.get(main.part, f'{main.part:.0%}')} of the jobs" if main.part < 1 else "all jobs"
    if slurm_s < LITTLE_WAIT_S:
        return f"Nothing to gain: jobs wait for {about(slurm_s)} on average as it is."
    lost = f"; {losers[0]}" if losers else "; no class of jobs is clearly worse off"
    return (
        f"With {whose} keeping checkpoints: mean wait {_change(slurm_s, main.wait_s)}, completion time "
        f"{percent(main.change)}{lost}; {_worth(jobs)}."
    )


def _change(before_s: float, after_s: float) -> str:
    """Return two times in one unit, that of the larger one."""
    unit = unit_of((max(before_s, after_s),))
    texts = [f"{number(value / unit.seconds, 1)}{NARROW}{unit.sign}" for value in (before_s, after_s)]
    return " → ".join(text if not text.startswith("0.0") or not value else about(value)
                      for text, value in zip(texts, (before_s, after_s), strict=True))  # fmt: skip


def _of(effects: Sequence[Effect], *, users: bool) -> list[Effect]:
    return sorted((one for one in effects if one.users == users), key=lambda one: one.part)


def from_part(effects: Sequence[Effect]) -> float | None:
    """Return the least part that was tried from which on every larger one gains too; None if the largest does not."""
    found = None
    for effect in reversed(effects):
        if not effect.gains:
            break
        found = effect.part
    return found


def _worth(effects: Sequence[Effect]) -> str:
    least = from_part(effects)
    if least is None:
        return f"not worth it at any part up to {_part(effects[-1].part)}"
    return (
        f"worth it at {_part(least)}, the least tried"
        if least == effects[0].part
        else (f"not worth it below {_part(least)}")
    )


def _part(part: float) -> str:
    return f"{100 * part:.0f}{NARROW}%"


def _break_even(main: Effect, jobs: Sequence[Effect], users: Sequence[Effect]) -> str:
    """Return the break-even parts, and the interval over the draws."""
    texts = []
    for found, who in ((jobs, "of the jobs that keep checkpoints"), (users, "of the users who opt in with all jobs")):
        if len(found) > 1:
            least, tried = from_part(found), ", ".join(f"{100 * one.part:.3g}" for one in found)
            texts.append(f"{'at no part' if least is None else f'from {_part(least)} on'} {who} (tried: {tried})")
    spread = (
        f"Change of the completion time: {interval(main)} (95 % interval over the draws)."
        if main.half is not None
        else "One draw of the jobs that keep checkpoints, so no interval: --draws 3."
    )
    return f"It pays {', and '.join(texts)}. {spread}" if texts else spread


def interval(effect: Effect) -> str:
    """Return the 95 % interval of a change of the completion time; nothing for one draw."""
    half = effect.half
    return "" if half is None else f"{percent(max(effect.change - half, -1.0))} to {percent(effect.change + half)}"


def _losers(comparison: Comparison, label: str) -> list[str]:
    """Return the classes of jobs that end clearly later, the worst first."""
    at = next(result.index for result in comparison.results if result.label == label)
    found = []
    for item in comparison.by_size:
        cell = item.cells[at]
        if min(item.jobs) >= MIN_JOBS and (cell.ratio or 1.0) > 1 + WORSE and cell.verdict == "worse":
            width, _, length = item.name.partition(", ")
            found.append(
                (-(cell.ratio or 1.0), f"jobs of {width} {LENGTHS[length]} {percent((cell.ratio or 1.0) - 1)}")
            )
    return [text for _, text in sorted(found)]


def _who(groups: Mapping[str, Sequence[Slice]], comparison: Comparison, label: str) -> str:
    """Return the accounts and QOS that win and lose most, and the classes of jobs that lose."""
    at = next(result.index for result in comparison.results if result.label == label)
    texts = []
    for name, slices in groups.items():
        found = sorted(
            (cell.ratio, item.name) for item in slices if min(item.jobs) >= MIN_JOBS
            if (cell := item.cells[at]).ratio is not None
        )  # fmt: skip
        if found:
            ends = [found[0], *found[1:][-1:]]
            told = " to ".join(f"{who} {percent((ratio or 1.0) - 1)}" for ratio, who in ends)
            texts.append(f"{'QOS' if name == 'qos' else f'{name}s'}: {told}")
    losers = _losers(comparison, label)
    texts.append(
        f"later end: {', '.join(losers[:3])}"
        if losers
        else f"no class of jobs ends clearly later, by {_part(WORSE)} or more"
    )
    return f"Completion time by {'; '.join(texts)}." if groups else f"Classes by GPUs and run time: {texts[-1]}."


# --- What it rests on --------------------------------------------------------------------------------------


def _baseline(was_s: float, slurm_s: float, *, refused: bool) -> str:
    """Return the error of the simulated Slurm."""
    error = f" ({percent((slurm_s - was_s) / was_s)})" if was_s else ""
    text = f"the simulated Slurm has jobs wait {about(slurm_s)} on average, they really waited {about(was_s)}{error}"
    if not refused:
        return f"{text[0].upper()}{text[1:]}; a verdict needs {_part(MAX_ERROR)} or less."
    return f"{text}, more than {_part(MAX_ERROR)} apart."


def _causes(found: WhatIf, too_short: bool) -> Iterator[str]:  # noqa: FBT001
    """Yield why the simulated Slurm waits otherwise than the real one, as far as these files tell."""
    beside = _idle_anyway(found.past)
    if too_short and beside >= IDLE_ANYWAY:
        yield (
            f"In {_part(beside)} of their waiting as many GPUs were idle as the jobs needed: a limit, a reservation, a "
            "drained host or a type of GPU kept them, of which these files tell nothing."
        )
    if not too_short and (most := _most_gpus(found.past.jobs)) > found.past.gpus:
        yield (
            f"Up to {most:,} GPUs were in use, and these nodes have {found.past.gpus:,}: the cluster was larger then."
        )
    if found.site_notes:
        yield from found.site_notes[:2]
    elif not (too_short and beside >= IDLE_ANYWAY):
        yield "The files name no cause; give the rules of the site with --site, or one partition with --partition."


def _most_gpus(jobs: Sequence[JobResult]) -> int:
    """Return the most GPUs that were in use at a time."""
    changes = sorted(
        change
        for job in jobs
        if job.start_s is not None and job.finish_s is not None
        for change in ((job.start_s, job.gpus), (job.finish_s, -job.gpus))
    )
    return max(accumulate(gpus for _, gpus in changes), default=0)


def _idle_anyway(past: Run) -> float:
    """Return the part of all waiting in which as many GPUs were idle as the waiting job needs."""
    times = [sample.time_s for sample in past.samples]
    waited_s = beside_s = 0.0
    sums: dict[int, list[float]] = {}
    for gpus in {job.gpus for job in past.jobs}:
        spans = (
            after.time_s - sample.time_s if past.gpus - sample.gpus_held >= gpus else 0.0
            for sample, after in pairwise(past.samples)
        )
        sums[gpus] = list(accumulate(spans, initial=0.0))
    for job in past.jobs:
        if job.start_s is not None and times:
            first, last = (min(bisect_right(times, at_s), len(times)) - 1 for at_s in (job.submit_s, job.start_s))
            waited_s += job.start_s - job.submit_s
            beside_s += sums[job.gpus][max(last, 0)] - sums[job.gpus][max(first, 0)]
    return min(beside_s / waited_s, 1.0) if waited_s else 0.0
