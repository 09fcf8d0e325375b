"""Effects of tunes, packs, migrations and resizes on the iteration time of jobs, measured before and after (pure)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.structs import replace

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.actions import Action, Migrate, Pack, Resize, Tune, Unpack
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job, JobKey, Placement
from cadenza.policies.core.text import job_names
from cadenza.policies.sharing.state.measurement import MIN_ITERATIONS

Kind: TypeAlias = Literal["tune", "pack", "migrate", "resize"]
Verdict: TypeAlias = Literal["", "kept", "undone", "unknown"]

MIN_STEPS, FULL_STEPS = 30, 300
"""Least iterations of a measurement, and the number at which it is complete."""
MAX_UNMEASURED_S = 3600.0
REPLACED = "replaced before it was measured"


class Effect(msgspec.Struct, frozen=True):
    """One decision that was carried out, and its effect on one of its jobs; times in seconds.

    Iteration times are seconds with the GPUs for each iteration, without the waiting for turns. For a pack they are
    the times by which the pack was judged: alone, and with the co-runners.
    """

    decision: int
    """The action's row in the store."""
    kind: Kind
    job: int
    restart: int
    """The incarnation that the decision was about; a move's measurement after it is of a later one."""
    user: str
    at_s: float
    reason: str
    was: str
    now: str
    """Resources before and after the decision; for a pack, the jobs that it runs with."""
    predicted: float | None = None
    """Throughput after over before by the profile."""
    before_s: float | None = None
    after_s: float | None = None
    gain: float | None = None
    """Measured throughput after over before; for a pack that of all its jobs together, where turns are 1."""
    verdict: Verdict = ""
    """"": being measured; *kept*: measured and in force; *unknown*: it ended before it was measured."""
    detail: str = ""
    """Reason for which it was undone, or could not be measured."""
    ended_s: float | None = None
    """Time at which it was undone, replaced, or its job ended; None: in force."""
    mark_step: int | None = None
    mark_held_s: float = 0.0
    """Step and held time at which the measurement after it began."""

    @property
    def key(self) -> JobKey:
        """Return the job."""
        return JobKey(self.job, self.restart)

    @property
    def measured(self) -> bool:
        """True if no more measurements are needed; a pack is measured as long as it stands."""
        if self.kind == "pack":
            return False
        return self.verdict not in ("", "kept") or (self.after_s is not None and self.mark_step is None)


# --- Marks ---------------------------------------------------------------------------------------------


class Marks(NamedTuple):
    """Two marks of a job's progress under one configuration: iterations, and seconds with its GPUs."""

    setting: object
    old: tuple[int, float]
    young: tuple[int, float]


def marks(before: Mapping[JobKey, Marks], snapshot: ClusterSnapshot, memory: Memory) -> dict[JobKey, Marks]:
    """Return the marks of all jobs that train, advanced so that the older one is never far behind."""
    packed = {key: group for group in memory.sharing.packs for key in group}
    marks = {}
    for job in snapshot.jobs:
        if job.opted_in and job.lease is not None and job.lease.step:
            setting, here, mark = (job.placement, packed.get(job.key)), _mark(job), before.get(job.key)
            if mark is None or mark.setting != setting or here[0] < mark.young[0]:
                mark = Marks(setting, here, here)
            elif here[0] - mark.young[0] >= FULL_STEPS:
                mark = Marks(setting, mark.young, here)
            marks[job.key] = mark
    return marks


def _mark(job: Job) -> tuple[int, float]:
    lease = job.lease
    return (lease.step, lease.vtime_s * lease.weight) if lease is not None else (0, 0.0)


def _iteration_s(since: tuple[int, float], job: Job) -> float | None:
    """Return the seconds with its GPUs for each iteration since a mark; None below ``MIN_STEPS`` iterations."""
    step, held_s = _mark(job)
    steps = step - since[0]
    return (held_s - since[1]) / steps if steps >= MIN_STEPS and held_s > since[1] else None


# --- Decisions -------------------------------------------------------------------------------------------


def begun(
    actions: Iterable[tuple[int, Action]], snapshot: ClusterSnapshot, memory: Memory, marks: Mapping[JobKey, Marks]
) -> tuple[Effect, ...]:
    """Return the effects to measure of the actions that were carried out, each with its row in the store."""
    alone_s = {row.job: row.iteration_s for row in memory.sharing.alone}
    effects = []
    for row, action in actions:
        if not isinstance(action, Tune | Pack | Migrate | Resize):
            continue
        keys = action.jobs if isinstance(action, Pack) else (action.job,)
        for job in [job for key in keys if (job := snapshot.job(key)) is not None]:
            before_s = alone_s.get(job.key) if isinstance(action, Pack) else None
            if not before_s and (mark := marks.get(job.key)) is not None:
                before_s = _iteration_s(mark.old, job)
            if not before_s and job.lease is not None:
                before_s = job.lease.iteration_s
            was, now = _change(action, job)
            if was != now:
                effects.append(
                    Effect(
                        row, KINDS[type(action)], *job.key, job.user, snapshot.time_s, action.reason, was, now,
                        _predicted(action, job, snapshot), before_s,
                    )
                )  # fmt: skip
    return tuple(effects)


KINDS: dict[type[Action], Kind] = {Tune: "tune", Pack: "pack", Migrate: "migrate", Resize: "resize"}


def _change(action: Action, job: Job) -> tuple[str, str]:
    """Return descriptions of a job's resources, and of those that an action gives it."""
    if isinstance(action, Tune):
        return _resources(job.placement), _resources(action.shares)
    if isinstance(action, Migrate | Resize):
        there = tuple((share.node, share.gpus) for share in action.shares)
        here = tuple((share.node, share.gpus) for share in job.placement)
        return _gpus(here or ((",".join(job.nodes), job.gpus),)), _gpus(there)
    return "alone", _co_runners(key for key in action.jobs if key != job.key) if isinstance(action, Pack) else ""


def _co_runners(others: Iterable[JobKey]) -> str:
    return f"with {job_names(others)}"


def _resources(placement: Placement) -> str:
    return ", ".join(f"{share.cpus} CPUs {share.memory_mb} MB on {share.node}" for share in sorted(placement))


def _gpus(shares: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{gpus} GPUs on {node}" for node, gpus in sorted(shares))


def _predicted(action: Action, job: Job, snapshot: ClusterSnapshot) -> float | None:
    """Return a tune's throughput over the present one by the job's profile."""
    if not isinstance(action, Tune) or job.profile is None or not job.placement:
        return None
    types = {node.name: node.gpu_type for node in snapshot.nodes}
    if any(share.node not in types for share in (*job.placement, *action.shares)):
        return None
    had = placement_speed(job.profile, job.placement, types)
    return placement_speed(job.profile, action.shares, types) / had if had else None


# --- Afterwards ------------------------------------------------------------------------------------------


def overtaken(effects: Iterable[Effect], actions: Iterable[Action], snapshot: ClusterSnapshot) -> tuple[Effect, ...]:
    """Return the effects that these actions, now carried out, undo or replace."""
    live = {(effect.decision, effect.job): effect for effect in effects}
    by_job: defaultdict[int, list[Effect]] = defaultdict(list)
    for effect in live.values():
        by_job[effect.job].append(effect)
    changed: dict[tuple[int, int], Effect] = {}
    for action in actions:
        key: JobKey | None = getattr(action, "job", None)
        mine = by_job[key.id] if key is not None else []
        if isinstance(action, Unpack):
            left = {effect.decision for effect in mine if effect.kind == "pack"}
            ended = [_undone(one, action.reason, snapshot) for one in live.values() if one.decision in left]
        else:  # an action of its kind undoes an effect if it restores the state before, and else replaces it
            job = snapshot.job(key) if key is not None else None
            now = _change(action, job)[1] if job is not None else None
            ended = [
                _undone(one, action.reason, snapshot) if one.was == now else _over(one, snapshot, REPLACED)
                for one in mine
                if one.kind == KINDS.get(type(action))
            ]
        changed.update(((one.decision, one.job), one) for one in ended)
    return tuple(changed.values())


def _undone(effect: Effect, reason: str, snapshot: ClusterSnapshot) -> Effect:
    return replace(effect, verdict="undone", detail=reason, ended_s=snapshot.time_s, mark_step=None)


def _over(effect: Effect, snapshot: ClusterSnapshot, reason: str) -> Effect:
    """Return an effect that ended without being undone."""
    if effect.after_s is not None:
        return replace(effect, verdict="kept", ended_s=snapshot.time_s, mark_step=None)
    return replace(effect, verdict="unknown", detail=reason, ended_s=snapshot.time_s, mark_step=None)


def advance(effects: Iterable[Effect], snapshot: ClusterSnapshot, memory: Memory) -> tuple[Effect, ...]:
    """Return the effects that a later round changes: measured, ended, or never come about."""
    live = tuple(effects)
    newest = {job.key.id: job for job in sorted(snapshot.jobs, key=lambda job: job.key)}
    advanced = [_advanced(effect, newest.get(effect.job), snapshot, memory) for effect in live]
    judged = [_judged(effect, advanced) for effect in advanced]
    return tuple(after for before, after in zip(live, judged, strict=True) if after != before)


def _advanced(effect: Effect, job: Job | None, snapshot: ClusterSnapshot, memory: Memory) -> Effect:
    if job is None or job.state == "OTHER":
        return _over(effect, snapshot, "the job ended before it was measured")
    if reason := _failure_reason(effect, job, memory):
        return _undone(effect, reason, snapshot)
    unpacked = effect.kind == "pack" and not any(effect.key in group for group in memory.sharing.packs)
    if unpacked or (effect.kind == "tune" and job.key != effect.key):
        return _over(effect, snapshot, "it ended before it was measured")
    measured = _measured(effect, job)
    if measured.after_s is None and snapshot.time_s - effect.at_s > MAX_UNMEASURED_S and not measured.verdict:
        return replace(measured, verdict="unknown", detail="too few iterations within an hour")
    return measured


def _failure_reason(effect: Effect, job: Job, memory: Memory) -> str | None:
    """Return the reason for which a move has failed; None if it has not."""
    move = next((move for move in memory.moves if move.job == effect.key and move.over), None)
    if effect.kind not in ("migrate", "resize") or move is None:
        return None
    there = set(job.nodes) == set(move.nodes) and job.gpus == sum(share.gpus for share in move.shares)
    arrived = job.key.restart > effect.restart and (there or not job.nodes)
    return None if arrived else move.outcome


def _measured(effect: Effect, job: Job) -> Effect:
    moved = effect.kind in ("migrate", "resize")
    if effect.measured or job.lease is None or not job.lease.step or moved == (job.key == effect.key):
        return effect
    step, held_s = _mark(job)
    if effect.kind == "pack":  # the iteration time with its co-runners, as the agents measured it
        pace = job.lease.pace
        if pace is None or pace.iterations < MIN_ITERATIONS or effect.now != _co_runners(pace.co_runners):
            return effect
        return replace(effect, after_s=pace.iteration_s or effect.after_s)
    if effect.mark_step is None or step < effect.mark_step:
        return replace(effect, mark_step=step, mark_held_s=held_s)
    after_s = _iteration_s((effect.mark_step, effect.mark_held_s), job)
    mark_step = None if after_s and step - effect.mark_step >= FULL_STEPS else effect.mark_step
    return replace(effect, after_s=after_s or effect.after_s, mark_step=mark_step)


def _judged(effect: Effect, all_of_them: Sequence[Effect]) -> Effect:
    """Return an effect with its gain and, once it is measured, its verdict; the gain of a pack needs all its jobs."""
    one_pack = effect.kind == "pack"
    parts = [one for one in all_of_them if one.decision == effect.decision] if one_pack else [effect]
    speeds = [one.before_s / one.after_s for one in parts if one.before_s and one.after_s]
    gain = sum(speeds) if len(speeds) == len(parts) else None
    kept = effect.after_s is not None and effect.verdict == ""
    return replace(effect, gain=gain or effect.gain, verdict="kept" if kept else effect.verdict)
