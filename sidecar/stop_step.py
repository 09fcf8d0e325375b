"""One stop step for all ranks of a job: the next action, given the progress of each rank.

Ranks of synchronous data-parallel training are at most one boundary apart. A rank that slipped past the stop step
blocks in the next all-reduce until the ranks that wait at the stop step go on. Therefore the stop step is only ever
raised, to a boundary that no rank has left, until all stand at the same one (Gandiva, OSDI'18: suspend-resume at a
mini-batch boundary). The agent uses this for the ranks of a host, the service for the hosts of a job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

GRACE_S = 0.02
"""Time that a rank may be at the stop step without arriving before it counts as having slipped past it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of one rank, or of all ranks of one host: ``step`` boundaries completed."""

    step: int
    arrived: bool = False
    """It stands at boundary ``step`` and waits for the next order."""
    arriving: bool = False
    """It has reached boundary ``step`` and is about to arrive there."""
    refused: str = ""
    """Name of the state that it cannot move; otherwise empty."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing yet."""


@dataclass(frozen=True, slots=True)
class Raise:
    """Tell all ranks to stop at the first boundary whose step is at least ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Let all move their state out: they stand at boundary ``step``."""

    step: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw the stop; ``kind`` is *refused* or *timeout*."""

    kind: str
    reason: str


Plan: TypeAlias = Wait | Raise | Commit | Cancel


def plan_stop(
    ranks: Sequence[Progress], *, stop: int, waited_s: float, timeout_s: float, quiet_s: float, in_step: bool = True
) -> Plan:
    """Return the next action of a stop under way.

    ``stop`` is the present stop step (0: none yet), ``waited_s`` the time since the order, ``quiet_s`` the time since
    ``ranks`` last changed; all in seconds. An arrival below ``stop`` is over: that rank goes on. Ranks that are not
    ``in_step`` train apart: each stops at its own next boundary.
    """
    refused = next((rank.refused for rank in ranks if rank.refused), "")
    if refused:
        return Cancel("refused", refused)
    here = [rank.arrived and rank.step >= stop for rank in ranks]
    steps = {rank.step for rank in ranks}
    if ranks and stop and all(here) and (len(steps) == 1 or not in_step):
        return Commit(max(steps))
    if waited_s >= timeout_s:
        return Cancel("timeout", _late(ranks, here, waited_s))
    if not ranks:
        return Wait()
    if not stop:
        return Raise((max(steps) if in_step else min(steps)) + 1)
    return _raise(ranks, here, stop, quiet_s) if in_step else Wait()


def _raise(ranks: Sequence[Progress], here: Sequence[bool], stop: int, quiet_s: float) -> Plan:
    """Raise the stop step if a rank stopped beyond it or slipped past it; otherwise wait."""
    reached = max((rank.step for rank, done in zip(ranks, here, strict=True) if done), default=stop)
    slipped = [
        rank.step + 1
        for rank, done in zip(ranks, here, strict=True)
        if not done and not rank.arriving and rank.step >= stop
    ]
    goal = max(reached, *slipped) if slipped and quiet_s >= GRACE_S else reached
    return Raise(goal) if goal > stop else Wait()


def _late(ranks: Sequence[Progress], here: Sequence[bool], waited_s: float) -> str:
    """Name the ranks that had not arrived when the time was up."""
    if not ranks:
        return f"no rank answered within {waited_s:.1f} s"
    late = [str(index) for index, done in enumerate(here) if not done]
    steps = f"steps {min(rank.step for rank in ranks)} to {max(rank.step for rank in ranks)}"
    return f"{len(late)} of {len(ranks)} had not arrived after {waited_s:.1f} s ({steps}): {', '.join(late[:8])}"
