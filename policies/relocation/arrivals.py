"""Arrivals of moved jobs: receipts of ordered checkpoints, jobs that went on without theirs, stalled file systems.

All of it is in the memory, so that a restarted service, and the second start of a job after the move, still have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job

STALLED_S = 600.0
"""Time for which no job is asked to save on a file system on which a checkpoint was overdue."""


def noted_arrivals(memory: Memory, snapshot: ClusterSnapshot) -> Memory:
    """Return the memory with the agents' word on ordered checkpoints, without that on jobs that are gone."""
    live, now_s = snapshot.by_id, snapshot.time_s
    receipts = {number: receipt for number, receipt in memory.receipts.items() if number in live}
    unrestored = {number: reason for number, reason in memory.unrestored.items() if number in live}
    stalled = {name: at_s for name, at_s in memory.stalled.items() if now_s - at_s < STALLED_S}
    for job in snapshot.jobs:
        lease = job.lease
        if lease is None:
            continue
        number = job.key.id
        before = receipts.get(number)
        if lease.receipt is not None:
            same = before is not None and before[:3] == lease.receipt[:3] and before.left_s > 0
            receipts[number] = before if same and before else lease.receipt._replace(left_s=now_s)
        elif before is not None and before.restart > job.key.restart and lease.state == "held":
            receipts[number] = before._replace(left_s=0.0)  # it went on instead
        if lease.unrestored:
            unrestored[number] = lease.unrestored
        if lease.stalls and lease.file_system:
            stalled[lease.file_system] = now_s
    if (receipts, unrestored, stalled) == (memory.receipts, memory.unrestored, memory.stalled):
        return memory
    return replace(memory, receipts=receipts, unrestored=unrestored, stalled=stalled)


def marked_unrestored(snapshot: ClusterSnapshot, unrestored: Mapping[int, str]) -> ClusterSnapshot:
    """Return the snapshot in which jobs that must not be moved again save no checkpoints."""
    if not unrestored:
        return snapshot
    return replace(snapshot, jobs=tuple(_marked(job, unrestored.get(job.key.id, "")) for job in snapshot.jobs))


def _marked(job: Job, reason: str) -> Job:
    if not reason or job.lease is None:
        return job
    return replace(job, lease=replace(job.lease, checkpoints=False, saves_away=False, unrestored=reason))
