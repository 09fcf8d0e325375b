"""GPU time of accounts by day, and what each lacks of its max-min fair part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from philly_sample import DAY_S

from cadenza.policies.inputs.trace import TraceJob

LEAST_PART = 0.01
"""Part of all fair GPU time that an account has which is looked at by itself."""

Floats: TypeAlias = NDArray[np.float64]


class Span(NamedTuple):
    """A time in which a job of an account has GPUs, or asks for them. Times in seconds."""

    account: str
    begin_s: float
    end_s: float
    gpus: int


class Lack(NamedTuple):
    """Part of their fair GPU time that all accounts together lack, and that each one does with a hundredth of it."""

    whole: float
    parts: dict[str, float]
    gpu_s: float
    """GPU time that all accounts together lack."""

    @property
    def worst(self) -> tuple[float, str]:
        """Return the largest part, and whose it is."""
        return max(((part, name) for name, part in self.parts.items()), default=(0.0, ""))

    def beyond(self, other: Lack) -> tuple[float, str]:
        """Return how much more of its part an account lacks here than in another run: the most, and whose it is."""
        more = [(self.parts[name] - other.parts[name], name) for name in self.parts if name in other.parts]
        return max(more, default=(0.0, ""))


class Recorder:
    """Follows a simulation's jobs: ``spans`` are the times in which they have had GPUs."""

    def __init__(self, jobs: Iterable[TraceJob]) -> None:
        self._accounts = {job.id: job.account for job in jobs}
        self._now: dict[int, tuple[float, int]] = {}
        self.spans: list[Span] = []

    def __call__(self, now_s: float, job: int, gpus: int) -> None:
        """Note the GPUs that a job has from now on."""
        since_s, had = self._now.pop(job, (now_s, 0))
        if had:
            self.spans.append(Span(self._accounts[job], since_s, now_s, had))
        if gpus:
            self._now[job] = now_s, gpus


def by_day(spans: Iterable[Span], accounts: Sequence[str], days: int) -> Floats:
    """Return the GPU seconds of spans by day and account."""
    at = {name: number for number, name in enumerate(accounts)}
    found = np.zeros((days, len(accounts)))
    for account, begin_s, end_s, gpus in spans:
        for day in range(int(begin_s // DAY_S), min(int(end_s // DAY_S) + 1, days)):
            inside_s = min(end_s, (day + 1) * DAY_S) - max(begin_s, day * DAY_S)
            found[day, at[account]] += gpus * inside_s
    return found


def fair_parts(whole: float, wanted: Floats, shares: Floats) -> Floats:
    """Return max-min fair parts of a whole: in proportion to the shares, and no part is more than what is wanted."""
    parts, order = np.zeros(len(wanted)), np.argsort(wanted / shares, kind="stable")
    rest = shares[order][::-1].cumsum()[::-1]
    for at, share in zip(order.tolist(), (shares[order] / rest).tolist(), strict=True):
        parts[at] = min(wanted[at], share * whole)
        whole -= parts[at]
    return parts


def fair_time(had: Floats, wanted: Floats, shares: Floats, gpus: int) -> tuple[Floats, Floats]:
    """Return by day and account the GPU seconds that are lacked, and the fair ones; zeros for days without contention.

    A day is contended if the live jobs ask for more GPU time than the cluster has. What the accounts had then, all
    together, is shared out fairly: in proportion to their shares, and to none more than its live jobs ask for.
    """
    fair = np.zeros_like(had)
    for day in np.flatnonzero(wanted.sum(axis=1) > gpus * DAY_S):
        fair[day] = fair_parts(float(had[day].sum()), wanted[day], shares)
    return np.maximum(fair - had, 0), fair


def lack(had: Floats, wanted: Floats, shares: Floats, gpus: int, accounts: Sequence[str]) -> Lack:
    """Return the part of the fair GPU time that is lacked on contended days; nothing without such a day."""
    lacked, fair = (found.sum(axis=0) for found in fair_time(had, wanted, shares, gpus))
    whole = float(fair.sum())
    counted = np.flatnonzero(fair > LEAST_PART * whole).tolist()
    parts = {accounts[at]: float(lacked[at] / fair[at]) for at in counted}
    all_s = float(lacked.sum())
    return Lack(all_s / whole if whole else 0.0, parts, all_s)
