"""When the next round is due (pure): adaptive, jittered, and never more than Slurm can bear."""

from __future__ import annotations

from random import Random

LOAD_SHARE = 20.0
"""A round's load of Slurm's books takes at most one part in this many of slurmctld's time."""
MOVE_SHARE = 2.0
"""The same of rounds that a job on its way to other nodes waits for."""
JITTER = 0.1
BACKED_OFF_S = 30.0


def pause_s(poll_s: float, load_s: float, failures: int, rng: Random) -> float:
    """Return the time between the starts of two rounds, seconds.

    ``load_s`` is what the last load took. Each failure in a row doubles the pause, up to ``BACKED_OFF_S`` or
    the pause itself if that is longer.
    """
    base = max(poll_s, LOAD_SHARE * load_s)
    backed_off = min(base * float(2 ** min(failures, 16)), max(base, BACKED_OFF_S))
    return backed_off * (1 + rng.uniform(-JITTER, JITTER))


def early_s(spacing_s: float, load_s: float, failures: int, *, moving: bool = False) -> float:
    """Return how soon after a round's start news may start the next one, seconds.

    ``moving``: a job stands still until the next round; such rounds are few, so they may be closer.
    """
    if failures:
        return float("inf")
    return MOVE_SHARE * load_s if moving else max(spacing_s, LOAD_SHARE * load_s)
