"""Preferred jobs among those that share GPUs: Synergy's orderings with Gandiva's turns as their preemption.

Synergy preempts by checkpoint and restart, once in a round of minutes (OSDI'22, §3); a turn costs a copy to host memory
and back. So the job that the ordering puts first among those that it meets may keep its GPUs from them, but for the
turns that ``sharing.turns`` owes to newcomers and to those that have waited too long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from cadenza.policies.core.model import Gpu, JobKey
from cadenza.policies.sharing.turns.contender import Contender


def preferred(contenders: Iterable[Contender], ranks: Mapping[JobKey, int]) -> frozenset[JobKey]:
    """Return the jobs that come first in the ordering on each of their GPUs, and those without a first turn yet.

    ``ranks``: places in the ordering, 0 first. Jobs without a place, and jobs that may not run now, stand in no job's
    way; jobs of other priorities are compared by these, not by the ordering.
    """
    ranked = [c for c in contenders if c.key in ranks and c.eligible]
    first: dict[tuple[Gpu, int], int] = {}
    for contender in ranked:
        for gpu in contender.gpus:
            place = (gpu, contender.priority)
            first[place] = min(first.get(place, len(ranks)), ranks[contender.key])
    return frozenset(
        c.key for c in ranked if not c.started or all(first[gpu, c.priority] == ranks[c.key] for gpu in c.gpus)
    )
