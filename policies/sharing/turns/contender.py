"""Contenders of turns: jobs with their GPUs, the preferred ones among them, and packed jobs as one (Gandiva, §4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

from cadenza.policies.core.model import Gpu, JobKey, LeaseState


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A job and the GPUs that it uses when it runs; times in seconds."""

    key: JobKey
    gpus: frozenset[Gpu]
    user: str = ""
    state: LeaseState = "waiting"
    """As in ``Lease``: waiting and yielded want the GPUs; held and stopping have them."""
    priority: int = 0
    weight: float = 1.0
    vtime_s: float = 0.0
    """Time held over weight, the current stretch included; starts at ``arrival_vtime``."""
    held_s: float = 0.0
    """The current stretch; 0 unless held or stopping."""
    waited_s: float = 0.0
    """Since it began to wait; 0 while held or stopping. Always 0 means no starvation bound."""
    ready: bool = False
    """True if it can be stopped; False for one that refused recently, or others claim GPUs in vain."""
    exclusive: bool = False
    """Unmanaged: never displaced, and displaces every managed holder at once."""
    iteration_s: float | None = None
    resume_ordered: bool = False
    """The service ordered its resume."""
    preferred: bool = False
    """The ordering puts it before those that it meets, or it is to have its first turn; see ``preferred`` below."""
    eligible: bool = True
    """False: it may not get the GPUs now (suspended by its owner, a part of a job on other hosts …)."""
    packed_with: frozenset[JobKey] = frozenset()
    """Jobs that may have its GPUs with it; without effect unless both name each other and have the same GPUs."""
    in_debt: bool = False
    """An earlier start of it had its GPUs too long, which its virtual time counts."""
    together_s: float = 0.0
    """The longest current stretch among those it is packed with; ``together`` fills it in."""

    def __post_init__(self) -> None:
        """Raise ValueError for a weight that no share can be computed from."""
        if not 0 < self.weight < inf:
            raise ValueError(f"job {self.key}: the weight must be above 0, not {self.weight}")

    @property
    def holding(self) -> bool:
        """Return True if it has the GPUs now."""
        return self.state in ("held", "stopping")

    @property
    def started(self) -> bool:
        """Return True if it ever had them."""
        return self.state != "waiting"

    @property
    def stretch_s(self) -> float:
        """Return the current stretch of the job and those it is packed with."""
        return max(self.held_s, self.together_s)


# --- Preferred jobs -------------------------------------------------------------------------------------


def preferred(contenders: Iterable[Contender], ranks: Mapping[JobKey, int]) -> frozenset[JobKey]:
    """Return the jobs that come first in the ordering on each of their GPUs, and those without a first turn yet.

    Synergy preempts by checkpoint and restart, once in a round of minutes (OSDI'22, §3); a turn costs a copy to host
    memory and back. So the job that the ordering puts first among those that it meets may keep its GPUs from them, but
    for the turns that the fair queue owes to newcomers and to jobs that have waited too long.

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
        c.key
        for c in ranked
        if not (c.started or c.in_debt) or all(first[gpu, c.priority] == ranks[c.key] for gpu in c.gpus)
    )


# --- Packed jobs ----------------------------------------------------------------------------------------


def together(contenders: Sequence[Contender]) -> list[Contender]:
    """Return the contenders, packed ones with the mean of their virtual times and the longest of their stretches.

    So no other job's virtual time lies between theirs, and a slice ends for all of them at once.
    """
    if not any(c.packed_with for c in contenders):
        return list(contenders)
    by_key = {c.key: c for c in contenders}
    return [_with_partners(c, by_key) if c.packed_with else c for c in contenders]


def _with_partners(contender: Contender, by_key: dict[JobKey, Contender]) -> Contender:
    named = [by_key[key] for key in sorted(contender.packed_with) if key in by_key]
    partners = [o for o in named if contender.key in o.packed_with and o.gpus == contender.gpus]
    if not partners:
        return replace(contender, packed_with=frozenset())
    unit = sorted((contender, *partners), key=attrgetter("key"))
    return Contender(  # replace() takes three times as long, and this is done for every packed job of a round
        key=contender.key,
        gpus=contender.gpus,
        user=contender.user,
        state=contender.state,
        priority=contender.priority,
        weight=contender.weight,
        vtime_s=sum([c.vtime_s for c in unit]) / len(unit),
        held_s=contender.held_s,
        waited_s=contender.waited_s,
        ready=contender.ready,
        exclusive=contender.exclusive,
        iteration_s=contender.iteration_s,
        resume_ordered=contender.resume_ordered,
        preferred=any(o.preferred for o in unit),
        eligible=contender.eligible,
        packed_with=frozenset([o.key for o in partners]),
        together_s=max([o.held_s for o in partners if o.holding], default=0.0) if contender.holding else 0.0,
    )
