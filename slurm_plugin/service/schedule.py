"""Timing of rounds: the pause between two, early rounds after news, and a watch on jobs in transit between nodes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from random import Random

from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.core.move import Move, Ordered, Prefetching, Requeued
from cadenza.slurm_plugin.gateway.slurm_gateway import SlurmGateway

log = logging.getLogger(__name__)

LOAD_FACTOR = 20.0
"""Rounds are at least this many times as long apart as Slurm takes for one answer."""
TRANSIT_LOAD_FACTOR = 2.0
"""The same for a round that a job in transit waits for."""
JITTER = 0.1
MAX_BACK_OFF_S = 30.0

TRANSIT_POLL_S = 0.05
"""Time between two looks at jobs in transit."""
MAX_TRANSIT_POLL_S = 60.0
"""Jobs that take longer than this are not worth the RPCs; they wait for the next regular round."""


def pause_s(poll_s: float, load_s: float, failures: int, rng: Random) -> float:
    """Return the time between the starts of two rounds, seconds.

    ``load_s`` is the time that Slurm took for its last answer. Each failure in a row doubles the pause, up to
    ``MAX_BACK_OFF_S`` or the regular pause if that is longer.
    """
    base = max(poll_s, LOAD_FACTOR * load_s)
    backed_off = min(base * float(2 ** min(failures, 16)), max(base, MAX_BACK_OFF_S))
    return backed_off * (1 + rng.uniform(-JITTER, JITTER))


def early_s(spacing_s: float, load_s: float, failures: int, *, prompt: bool = False) -> float:
    """Return the time after a round's start from which news may start the next one, seconds.

    ``prompt``: a job stands still until the next round. Such rounds are few, so they may be closer together.
    """
    if failures:
        return float("inf")
    return TRANSIT_LOAD_FACTOR * load_s if prompt else max(spacing_s, LOAD_FACTOR * load_s)


def needs_prompt_round(moves: Iterable[Move]) -> bool:
    """Return whether a job stands still, or soon will, until the next round (pure)."""
    return any(isinstance(move.phase, Prefetching | Ordered | Requeued) for move in moves)


def jobs_in_transit(moves: Iterable[Move], now_s: float) -> frozenset[int]:
    """Return the jobs that are leaving their nodes, whose next step only Slurm can tell (pure)."""
    return frozenset(
        move.job.id
        for move in moves
        if isinstance(move.phase, Requeued) and now_s - move.phase.since_s < MAX_TRANSIT_POLL_S
    )


def has_moved_on(slurm: SlurmGateway, jobs: Collection[int], snapshot: ClusterSnapshot) -> bool:
    """Return whether Slurm shows one of these jobs in another state than the snapshot; False without an answer."""
    try:
        now = slurm.look(jobs)
    except Exception as error:  # noqa: BLE001 - as in a round: the next one will report the same error
        log.debug("jobs in transit could not be polled: %s", error)
        return False
    return now != {job.key: job.slurm_state(snapshot.time_s) for job in snapshot.jobs if job.key.id in jobs}
