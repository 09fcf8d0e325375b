"""Workloads as one line of text: ``synergy:load=8,split=20/70/10``; each key is checked by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from cadenza.policies.core.errors import InputError
from cadenza.policies.inputs.csv_table import integer, number, positive, quoted, suggest

MAX_JOBS = 1_000_000
"""Jobs of one generated workload."""


class Draws(Protocol):
    """Source of draws: a ``random.Random``, whose state determines all of them."""

    def random(self) -> float:
        """Return a number from 0 to below 1."""
        ...

    def uniform(self, a: float, b: float) -> float:
        """Return a number from ``a`` to ``b``."""
        ...

    def randint(self, a: int, b: int) -> int:
        """Return a whole number from ``a`` to ``b``, both included."""
        ...

    def randrange(self, start: int, /) -> int:
        """Return a whole number from 0 to below ``start``."""
        ...


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a workload: how its text is read (text and the words that messages begin with), default, meaning."""

    name: str
    read: Callable[[str, str], Any]
    default: str
    line: str


def read_values(text: str, keys: Sequence[Key], where: str) -> dict[str, Any]:
    """Return the value of every key of ``name=value,…``, defaults included; raise InputError naming the key."""
    known = {key.name: key for key in keys}
    given: dict[str, str] = {}
    for part in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (item.strip() for item in part.partition("="))
        if name not in known:
            raise InputError(f"{where}: unknown key {quoted(name)}; {suggest(name, known)}")
        if not equals or not value:
            raise InputError(f"{where}: {name}: has no value; for example {name}={known[name].default}")
        if name in given:
            raise InputError(f"{where}: {name}: is there twice")
        given[name] = value
    return {name: key.read(given.get(name, key.default), f"{where}: {name}") for name, key in known.items()}


count = partial(integer, least=1, most=MAX_JOBS)
seconds = partial(number, most=1e9)
above_zero = partial(positive, most=1e9)
share = partial(number, most=1.0)
"""Readers of a number of jobs, of seconds from 0, of a number above 0, and of a share from 0 to 1."""


def span(text: str, where: str) -> tuple[float, float]:
    """Read ``LOW-HIGH``, both above 0."""
    low, dash, high = text.partition("-")
    if not dash:
        raise InputError(f"{where}: {quoted(text)} is not LOW-HIGH, for example 30-45")
    found = positive(low.strip(), where, 1e9), positive(high.strip(), where, 1e9)
    if found[0] > found[1]:
        raise InputError(f"{where}: {quoted(text)} ends below where it begins")
    return found


def one_of(*names: str) -> Callable[[str, str], str]:
    """Return a reader of one of some names."""

    def read(text: str, where: str) -> str:
        if text not in names:
            raise InputError(f"{where}: {quoted(text)} is none of {', '.join(names)}")
        return text

    return read
