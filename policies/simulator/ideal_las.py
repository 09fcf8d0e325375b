"""Ideal least attained service on a trace: preemption that costs nothing, to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from cadenza.policies.inputs.trace import TraceJob

QUANTUM_S = 60.0
"""Time after which others may go on, while more is asked for than there is."""
ROUNDING_S = 1e-6


def ideal_las(jobs: Sequence[TraceJob], gpus: int) -> list[float]:
    """Return the completion time of each job in order of submission, seconds.

    The jobs with the least attained GPU time have the GPUs; switches cost nothing, all jobs can leave, where GPUs lie
    does not matter, and every job runs as fast as at its proportional share. Jobs wider than ``gpus`` are left out.
    """
    ordered = sorted((job for job in jobs if 0 < job.gpus <= gpus), key=lambda job: (job.submit_s, job.id))
    ends = [0.0] * len(ordered)
    live: list[tuple[float, int]] = []
    """Attained GPU time, and the job's position."""
    left = [job.work_s for job in ordered]
    now_s, arrived = 0.0, 0
    while arrived < len(ordered) or live:
        # 1. Those that have the GPUs now.
        live.sort()
        going, waiting, free = [], [], gpus
        for at, (attained, job) in enumerate(live):
            if ordered[job].gpus <= free:
                free -= ordered[job].gpus
                going.append((attained, job))
            else:
                waiting.append((attained, job))
            if not free:
                waiting += live[at + 1 :]
                break
        # 2. Until the next arrival, the next end, or the next look at the order.
        until_s = ordered[arrived].submit_s if arrived < len(ordered) else inf
        if going:
            until_s = min(until_s, now_s + min([left[job] for _, job in going]))
        passed_s = (min(until_s, now_s + QUANTUM_S) if waiting else until_s) - now_s
        now_s += passed_s
        for attained, job in going:
            left[job] -= passed_s
            if left[job] <= ROUNDING_S:
                ends[job] = now_s
            else:
                waiting.append((attained + passed_s * ordered[job].gpus, job))
        while arrived < len(ordered) and ordered[arrived].submit_s <= now_s:
            waiting.append((0.0, arrived))
            arrived += 1
        live = waiting
    return [end_s - job.submit_s for end_s, job in zip(ends, ordered, strict=True)]
