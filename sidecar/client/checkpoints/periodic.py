"""Periodic saves: when the next one is due, and the boundary, the same on every rank, at which it is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cadenza.sidecar.client.checkpoints.collective import Ranks
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session.save_points import Gradients

LOOK_S = 4.0
"""Seconds of training between two looks at the clock, which the hot loop knows nothing of."""
MAX_STEPS = 256
"""Training steps between two looks, at most."""
TRIES = 1024
"""Boundaries without a save point after which a period is left out."""
MARGIN = 3
"""Looks between rank 0's decision and the boundary of the save, so that every rank has seen it by then."""


class Periodic:
    """Decides at looks, which are boundaries, whether to save there.

    Ranks have different clocks, so rank 0 decides, and publishes the step at which all begin to look for a save point.
    """

    def __init__(self, seconds: float, ranks: Ranks) -> None:
        self._seconds, self._ranks = seconds, ranks
        self._due_ns = monotonic_ns() + int(seconds * 1e9)
        self._number = 0
        self._from: int | None = None
        """First step at which the save may be taken; None while none is due."""
        self._tries = 0
        self._gradients = Gradients()

    def next_look(self, step: int, step_s: float) -> int:
        """Return the step of the next look, at a mean time of a step."""
        if self._from is not None:
            return max(step + 1, self._from)
        return step + self._stride(step_s)

    def saves(self, step: int, step_s: float, watched: Callable[[], Iterable[object]], may: Callable[[], bool]) -> bool:
        """Return whether to save at this boundary; ``may()`` is False where the script's epoch ends."""
        if self._from is None:
            self._from = self._begin(step, step_s)
        if self._from is None or step < self._from:
            return False
        first = self._tries == 0
        self._tries += 1
        if first:
            self._gradients.follow(lambda: self._from is not None)
        if not self._gradients.pending(watched()) and not first and may():
            self.over()
            return True
        if self._tries > TRIES:
            self.over()
        return False

    def over(self) -> None:
        """End this period, and begin the next."""
        self._gradients.forget()
        self._from, self._tries = None, 0
        self._number += 1
        self._due_ns = monotonic_ns() + int(self._seconds * 1e9)

    def _begin(self, step: int, step_s: float) -> int | None:
        """Return the step from which on this period's save may be taken, once it is due."""
        name = f"every/{self._number}"
        if self._ranks.rank == 0 and monotonic_ns() >= self._due_ns:
            begin = step + (MARGIN * self._stride(step_s) if self._ranks.size > 1 else 0)
            self._ranks.publish(name, begin)
            return begin
        return self._ranks.published(name) if self._ranks.rank else None

    def _stride(self, step_s: float) -> int:
        """Return the steps between two looks."""
        return max(1, min(MAX_STEPS, int(LOOK_S / step_s) if step_s > 0 else MAX_STEPS))
