"""Arrivals of moved jobs: receipts of ordered checkpoints, jobs that went on without theirs, stalled file systems.

All of it is in the memory, so that a restarted service, and the second start of a job after the move, still have it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Job

STALLED_S = 600.0
"""Time for which no job is asked to save on a file system on which checkpoints of two users were overdue. Those of one
user may stall on purpose, to keep all other jobs from being asked: that is held against the job alone."""


def noted_arrivals(memory: Memory, snapshot: ClusterSnapshot) -> Memory:
    """Return the memory with the agents' word on ordered checkpoints, without that on jobs that are gone."""
    live, now_s = snapshot.by_id, snapshot.time_s
    receipts = {number: receipt for number, receipt in memory.receipts.items() if number in live}
    unrestored = {number: reason for number, reason in memory.unrestored.items() if number in live}
    stalled: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, users in memory.stalled.items():
        stalled[name] = {user: at_s for user, at_s in users.items() if now_s - at_s < STALLED_S}
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
            stalled[lease.file_system][job.user] = now_s
    lately = {name: users for name, users in sorted(stalled.items()) if users}
    if (receipts, unrestored, lately) == (memory.receipts, memory.unrestored, memory.stalled):
        return memory
    return replace(memory, receipts=receipts, unrestored=unrestored, stalled=lately)


def marked_unrestored(snapshot: ClusterSnapshot, unrestored: Mapping[int, str]) -> ClusterSnapshot:
    """Return the snapshot in which jobs that must not be moved again save no checkpoints."""
    if not unrestored:
        return snapshot
    return replace(snapshot, jobs=tuple(_marked(job, unrestored.get(job.key.id, "")) for job in snapshot.jobs))


def _marked(job: Job, reason: str) -> Job:
    if not reason or job.lease is None:
        return job
    return replace(job, lease=replace(job.lease, checkpoints=False, saves_away=False, unrestored=reason))
