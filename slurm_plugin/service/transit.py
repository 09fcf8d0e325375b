"""Jobs that stand still on their way to other nodes: the next round follows Slurm's next step with them at once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from cadenza.policies.core.decision import Move
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Standing
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway

log = logging.getLogger(__name__)

LOOK_S = 0.05
"""Time between two looks at such jobs."""
LOOK_FOR_S = 60.0
"""How long they are looked at; what takes longer is not worth the RPCs."""


def hurried(moves: Iterable[Move]) -> bool:
    """Whether a job stands still, or is about to, until the next round that news starts early (pure)."""
    return any(move.phase in ("warming", "ordered", "requeued") for move in moves)


def awaited(moves: Iterable[Move], now_s: float) -> frozenset[int]:
    """Return the jobs that are leaving their nodes: only Slurm knows when they have (pure)."""
    return frozenset(move.job.id for move in moves if move.phase == "requeued" and now_s - move.since_s < LOOK_FOR_S)


def changed(slurm: SlurmGateway, jobs: Collection[int], snapshot: ClusterSnapshot) -> bool:
    """Whether one of these jobs does not stand as in the snapshot any more; False when Slurm does not answer."""
    try:
        now = slurm.look(jobs)
    except Exception as error:  # noqa: BLE001 - as in a round: whatever is wrong, the next one will say so
        log.debug("jobs on their way were not looked at: %s", error)
        return False
    return now != _shown(snapshot, jobs)


def _shown(snapshot: ClusterSnapshot, jobs: Collection[int]) -> dict[JobKey, Standing]:
    return {job.key: job.standing(snapshot.time_s) for job in snapshot.jobs if job.key.id in jobs}
