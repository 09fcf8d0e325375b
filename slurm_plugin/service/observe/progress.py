"""Progress of a job, from Slurm, the agents and the last round (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from cadenza.policies.allocation.problem import placement_speed
from cadenza.policies.core.idle_gpus import HOLDING
from cadenza.policies.core.model import Job, Progress


def progress(job: Job, before: Job | None, now_s: float, gpu_types: Mapping[str, str]) -> Progress:
    """Return a job's progress as of ``now_s``; ``before`` is the job in the last round, any incarnation of it.

    Work is counted in seconds at the proportional share. With a profile, a completed iteration counts its time there;
    without, every second with GPUs counts one. The work of earlier incarnations is done, because a requeued job goes
    on from its checkpoint. ``gpu_types``: by node.
    """
    was = before.progress if before is not None else None
    running = holds(job)
    attained_s = (was.attained_s if was is not None else 0.0) + _held_s(job, before, now_s)
    speed = _speed(job, was, gpu_types)
    done_s = (was.done_s * _scale(job, before) if was is not None else 0.0) + _work_s(job, before, now_s, speed)
    measured = _measured(job)
    rate = job.profile.iteration_s / measured if job.profile is not None and measured else speed
    gpu_type = next((gpu_types[name] for name in job.nodes if name in gpu_types), was.gpu_type if was else "")
    return Progress(
        at_s=now_s,
        total_s=total_s(job, done_s),
        done_s=done_s,
        attained_s=attained_s,
        ran_s=now_s if running or was is None or was.running else was.ran_s,
        running=running,
        rate=rate if running else 0.0,
        speed=speed,
        gpu_type=gpu_type,
        attained_on=_on_types(was, gpu_type),
        submitted_s=_submitted_s(job, before),
    )


def holds(job: Job) -> bool:
    """Return whether a job may use its GPUs now: by its lease, or without agents by its state in Slurm."""
    if job.lease is not None:
        return job.lease.state in HOLDING
    return job.state == "RUNNING"


def held_within(job: Job, before: Job | None, span_s: float) -> float:
    """Return the part of the last ``span_s`` seconds in which a job could use its GPUs.

    ``before`` is the job at the beginning of the span. A report of an agent may be older than the round that sees it:
    then the virtual clock stands still in one round and makes up for it in the next, so it counts only where a turn has
    begun or ended in the span.
    """
    lease = job.lease
    if lease is None:
        return span_s if job.state == "RUNNING" else 0.0
    holding = lease.state in HOLDING
    if holding and lease.held_s >= span_s:
        return span_s
    longest_s = span_s if holding else max(span_s - lease.waited_s, 0.0)
    if before is not None and before.lease is not None:  # the virtual clock misses no turn between two rounds
        return min(max((lease.vtime_s - before.lease.vtime_s) * lease.weight, 0.0), longest_s)
    return min(lease.held_s, longest_s)


def total_s(job: Job, done_s: float) -> float | None:
    """Return a job's whole work as its user states it, else its time limit; None without either."""
    stated_s = _stated_s(job)
    # A job that has done more than its user stated counts by its time limit, so that an understatement gains nothing.
    if stated_s is not None and done_s <= stated_s:
        return stated_s
    return None if job.time_limit_s is None else max(job.time_limit_s, done_s)


def _stated_s(job: Job) -> float | None:
    """Return a job's whole work as its user states it, in iterations if their time is known."""
    options = job.options
    if options is None:
        return None
    iteration_s = job.profile.iteration_s if job.profile is not None else _measured(job)
    if options.iterations is not None and iteration_s is not None:
        return options.iterations * iteration_s
    return options.duration_s


def _measured(job: Job) -> float | None:
    return job.lease.iteration_s if job.lease is not None else None


def _held_s(job: Job, before: Job | None, now_s: float) -> float:
    """Return the seconds with its GPUs since the last round, or since the job started."""
    lease, old = job.lease, _same(job, before)
    if old is None or old.progress is None:
        return 0.0 if job.run_s is None or (lease is not None and lease.state == "waiting") else job.run_s
    if lease is not None:
        return held_within(job, old, max(now_s - old.progress.at_s, 0.0))
    # Slurm's run time leaves suspends out (squeue(1), TIME).
    return max((job.run_s or 0.0) - (old.run_s or 0.0), 0.0)


def _work_s(job: Job, before: Job | None, now_s: float, speed: float) -> float:
    """Return the work done since the last round, or since it started."""
    lease, old = job.lease, _same(job, before)
    if job.profile is not None and lease is not None and lease.step:
        earlier = old.lease.step if old is not None and old.lease is not None else 0
        return max(lease.step - earlier, 0) * job.profile.iteration_s
    return _held_s(job, before, now_s) * speed


def _scale(job: Job, before: Job | None) -> float:
    """Return the factor for earlier work: a refined profile changes the work of an iteration."""
    was, now = before.profile if before is not None else None, job.profile
    if was is None or now is None or (was.model, was.gpu) != (now.model, now.gpu):
        return 1.0
    return now.iteration_s / was.iteration_s


def _submitted_s(job: Job, before: Job | None) -> float | None:
    """Return a requeued job's first submission; None for one that was not requeued, as far as rounds have seen it."""
    if before is None:
        return None
    known_s = before.progress.submitted_s if before.progress is not None else None
    return before.submit_s if known_s is None and before.key != job.key else known_s


def _same(job: Job, before: Job | None) -> Job | None:
    """Return the job in the last round if it was this incarnation."""
    return before if before is not None and before.key == job.key else None


def _speed(job: Job, was: Progress | None, gpu_types: Mapping[str, str]) -> float:
    """Return the throughput of a job's present or last placement by its profile."""
    if job.profile is None:
        return 1.0
    if not job.placement or any(share.node not in gpu_types for share in job.placement):
        return was.speed if was is not None else 1.0
    return placement_speed(job.profile, job.placement, gpu_types)


def _on_types(was: Progress | None, gpu_type: str) -> dict[str, float]:
    """Return the time on earlier GPU types; empty in a cluster of one type."""
    if was is None:
        return {}
    attained = dict(was.attained_on)
    if was.gpu_type not in ("", gpu_type) and gpu_type:
        attained[was.gpu_type] = was.attained_by_type(was.gpu_type, was.at_s)
    return attained
