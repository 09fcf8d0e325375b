"""Amounts of GPUs, CPUs and memory on one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Amount: TypeAlias = tuple[int, int, int]
"""GPUs, CPUs and MB."""


def fits(need: Sequence[int], free: Sequence[int]) -> bool:
    """Return True if there is room for so many GPUs, CPUs and MB."""
    return need[0] <= free[0] and need[1] <= free[1] and need[2] <= free[2]


def more(free: Amount, amount: Amount) -> Amount:
    """Return the sum of two amounts."""
    return free[0] + amount[0], free[1] + amount[1], free[2] + amount[2]


def less(free: Amount, amount: Amount) -> Amount:
    """Return the rest of an amount without another."""
    return free[0] - amount[0], free[1] - amount[1], free[2] - amount[2]
