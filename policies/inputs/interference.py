"""Speeds of two models that share a GPU: from a CSV, or from Gandiva's Table 1 through utilization."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.csv_table import number, positive, quoted, read_table

COLUMNS = ("model", "other", "speed", "other_speed")
ALONE = 1.0

Pairs = dict[tuple[str, str], tuple[float, float]]
"""Relative speeds of the first and the second model of a pair, each of its speed alone, in (0, 1]."""


class PackedRow(NamedTuple):
    """One row of Gandiva's Table 1: one GPU, several copies of one model."""

    model: str
    utilization: float
    """Share of time in which one copy keeps the GPU busy."""
    sliced: float
    """Mini-batches a second, all copies together, when they take turns."""
    packed: float
    """The same when they run at once."""

    @property
    def gain(self) -> float:
        """Return throughput packed over throughput taking turns."""
        return self.packed / self.sliced


def read_interference(text: str, source: str) -> Pairs:
    """Return the pairs of a file, each in both orders.

    Columns ``model,other,speed,other_speed``, speeds relative to running alone, above 0 and at most 1. Raise
    InputError with file and line, also for a pair that is there twice with other speeds.
    """
    table = read_table(text, source, COLUMNS)
    pairs: Pairs = {}
    for line, cells in table.rows:
        model, other, speed, other_speed = (cells[table.columns.index(name)] for name in COLUMNS)
        for name, column in ((model, "model"), (other, "other")):
            if not name:
                raise InputError(f"{table.at(line, column)}: is empty")
        first = positive(speed, table.at(line, "speed"), ALONE)
        second = positive(other_speed, table.at(line, "other_speed"), ALONE)
        for pair, values in (((model, other), (first, second)), ((other, model), (second, first))):
            if pairs.setdefault(pair, values) != values:
                raise InputError(f"{source}:{line}: {quoted(model)} and {quoted(other)} have other speeds further up")
    return pairs


def read_packed_rows(text: str, source: str) -> tuple[PackedRow, ...]:
    """Return the rows of a table like Gandiva's Table 1; raise InputError with file and line.

    Columns: ``model,gpu_utilization_percent,sliced_minibatches_per_s,packed_minibatches_per_s,gain_percent``.
    """
    names = ("model", "gpu_utilization_percent", "sliced_minibatches_per_s", "packed_minibatches_per_s")
    table = read_table(text, source, names, ("gain_percent",))
    rows = []
    for line, cells in table.rows:
        model, busy, sliced, packed = (cells[table.columns.index(name)] for name in names)
        rows.append(
            PackedRow(
                model,
                number(busy, table.at(line, names[1]), 0.1, 100.0) / 100,
                positive(sliced, table.at(line, names[2])),
                positive(packed, table.at(line, names[3])),
            )
        )
    return tuple(rows)


def pair_speed(utilization: float, gain: float, other_utilization: float, other_gain: float) -> float:
    """Return the speed, relative to running alone, that both of two packed models have.

    A model that packs with gain R and keeps the GPU busy for a share u of the time is taken to let a packed GPU do
    R·u of useful time a second (Gandiva, OSDI'18, Table 1: about 0.9 for the models of medium, 0.7 to 0.9 for those
    of high utilization). Two models ask for u₁ + u₂ and get the mean of what each lets the GPU do, weighted by what
    it asks for: speed = min(1, (R₁u₁² + R₂u₂²) / (u₁ + u₂)²). For two copies of one model this is min(1, R/2),
    which is the table's own row. Both slow down alike: Table 1 says nothing of how a loss is divided.

    >>> round(pair_speed(0.872, 53.0 / 63.8, 0.872, 53.0 / 63.8), 3), pair_speed(0.087, 5.12, 0.141, 3.6)
    (0.415, 1.0)
    """
    asked = utilization + other_utilization
    return min(ALONE, (gain * utilization**2 + other_gain * other_utilization**2) / asked**2)


def gain_at(utilization: float, rows: Sequence[PackedRow]) -> float:
    """Return the gain of packing at a utilization: linear between the table's rows, flat beyond them."""
    points = sorted((row.utilization, row.gain) for row in rows)
    below = [point for point in points if point[0] <= utilization]
    above = [point for point in points if point[0] > utilization]
    if not below or not above:
        return (below[-1:] or above[:1])[0][1]
    (left, low), (right, high) = below[-1], above[0]
    return low + (high - low) * (utilization - left) / (right - left)


def packing_pairs(profiles: Mapping[str, Profile], rows: Sequence[PackedRow]) -> Pairs:
    """Return the relative speeds of every pair of profiled models whose ``gpu_utilization`` is known.

    A model of the table has its own gain there, another one the gain of its utilization; see ``pair_speed``.
    """
    gains = {row.model: row.gain for row in rows}
    measured = [(name, profile.gpu_utilization) for name, profile in profiles.items()]
    known = [(name, busy, gains.get(name, gain_at(busy, rows))) for name, busy in measured if busy]
    speeds: Pairs = {}
    for name, busy, gain in known:
        for other, other_busy, other_gain in known:
            speed = pair_speed(busy, gain, other_busy, other_gain)
            speeds[name, other] = speed, speed
    return speeds
