"""First come, first served."""

from __future__ import annotations

from cadenza.policies.ordering.ranking import Queue, Ranking, arrival


def fifo(queue: Queue) -> Ranking:
    """Order by submission, then job id; the order of two jobs never changes (Synergy, OSDI'22 §5)."""
    return Ranking(tuple(sorted(queue.jobs, key=arrival)))
