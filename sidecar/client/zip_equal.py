"""zip() of sequences that must be equally long, for Python 3.9, whose zip() has no ``strict``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def zip_equal(first: Sequence[A], second: Sequence[B]) -> Iterator[tuple[A, B]]:
    """Return the pairs of two sequences; raise ValueError when their lengths differ.

    >>> dict(zip_equal("ab", [1, 2]))
    {'a': 1, 'b': 2}
    """
    if len(first) != len(second):
        raise ValueError(f"sequences of {len(first)} and {len(second)} items cannot be paired")
    return zip(first, second)
