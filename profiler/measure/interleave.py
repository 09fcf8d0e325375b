"""Points measured in turns: the point to visit next, and the mean over all visits of a point (pure).

Where a machine's speed changes within minutes (virtual machines, shared nodes), points measured one after the other
are of different machines. In turns each point is visited for a short while, again and again, so that all of them see
the same machine on average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cadenza.profiler.measure.point import Point
from cadenza.profiler.model.batch_means import Window, ratio
from cadenza.profiler.model.bisection import Search


class Visit(NamedTuple):
    """The next measurement."""

    turn: int
    cpus: float


def next_visit(grid: Sequence[float], visits: Sequence[Point], search: Search, turns: int) -> Visit | None:
    """Return the next measurement; None: enough.

    Each turn is a search of its own, which knows of a point what all its visits say: what only a disturbance asked for
    is not asked for again. The answer depends on nothing else, so that an interrupted profile goes on where it was.
    """
    known = {point.cpus: point.iteration_s for point in map(together, by_cpus(visits))}
    for turn in range(visits[-1].turn if visits else 0, turns):
        seen = {point.cpus for point in visits if point.turn == turn}
        cpus = search(grid, {each: known[each] for each in seen})
        if cpus is not None:
            return Visit(turn, cpus)
    return None


def measured(visits: Sequence[Point], within: float) -> list[Point]:
    """Return the points for which the last turn asked, each of all its visits; ``within`` as in a rule."""
    asked = {point.cpus for point in visits if point.turn == visits[-1].turn}
    found = (together(group) for group in by_cpus(visits) if group[0].cpus in asked)
    return [replace(point, settled=point.settled or point.half_s <= within * point.iteration_s) for point in found]


def by_cpus(visits: Sequence[Point]) -> list[list[Point]]:
    """Return the visits of each point, in the order of the first ones."""
    groups = defaultdict(list)
    for point in visits:
        groups[point.cpus].append(point)
    return list(groups.values())


def together(visits: Sequence[Point]) -> Point:
    """Return the mean over all visits of one point, with an interval from the differences between them."""
    if len(visits) == 1:
        return visits[0]
    found = ratio([Window(point.iteration_s * point.steps, point.steps) for point in visits])

    def mean(name: str) -> float:
        return float(sum(getattr(point, name) * point.steps for point in visits) / found.steps)

    return replace(
        visits[-1],
        iteration_s=found.mean_s,
        half_s=found.half_s,
        steps=found.steps,
        spent_s=sum(point.spent_s for point in visits),
        cpu_s=mean("cpu_s"),
        samples=mean("samples"),
        waited=mean("waited"),
        settled=False,
        others=mean("others"),
        stolen=mean("stolen"),
        memory_gb=max(point.memory_gb for point in visits),
    )
