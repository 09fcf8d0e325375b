"""The script's own steps: what is known of their unit, and the step that a checkpoint at this boundary has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

UNKNOWN, NAMED, BOUNDARY, OWN = "", "named", "boundary", "own"
"""Units: not known yet; the script names each step by ``at``; one training boundary a step; another one of the
script's own, such as epochs, so that only the script itself can number a checkpoint."""

NO_UNIT = "its unit of steps is not known yet: call keeper.at(step) in each step"
NAMED_TOO_EARLY = (
    "keeper.at(step) is called before the training of a step: call it after the optimizer's step, right before "
    "boundary()"
)
NAMED_TWICE = (
    "keeper.at(step) gives one number to several steps, and no sampler= knows the place between them: count the steps "
    "of all epochs"
)
NAMED_BACKWARDS = "keeper.at(step) counts from 0 again: count the steps of all epochs"
NOT_NAMED_AGAIN = "its script named its steps before this start, and has not called keeper.at(step) yet"


class Restored(int):
    """Step of a restored checkpoint, as the script itself last gave it; it is an ``int``, for ``range(step, …)``.

    ``epoch`` is the sampler's, None without one. ``ordered`` says that Cadenza requested the checkpoint, at a boundary
    between two saves of the script. ``boundaries`` counts the training boundaries of all starts, ``path`` is the
    checkpoint's directory.
    """

    epoch: Optional[int]  # noqa: UP045 - evaluated by Python 3.9's get_type_hints
    ordered: bool
    boundaries: int
    path: Path

    def __new__(  # noqa: PYI034 - typing.Self came with Python 3.11
        cls, step: int, *, epoch: int | None = None, ordered: bool = False, boundaries: int = 0, path: Path = Path()
    ) -> Restored:
        """Make one of what is known."""
        made = super().__new__(cls, step)
        made.epoch, made.ordered, made.boundaries, made.path = epoch, ordered, boundaries, path
        return made

    def __bool__(self) -> bool:
        """Step 0 was restored, too: ``if keeper.restore(): …``."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Be a plain number in the files of a script: one that reads them need not have this package."""
        return int, (int(self),)

    @property
    def step(self) -> int:
        """The step as a plain number."""
        return int(self)


class Units:
    """The unit of the script's steps, as far as it is known. Nothing is guessed: a number comes from the script.

    A script that saves step N after N training boundaries counts its steps by boundaries. One save is not enough to
    see it, because a script may number the step that it has just done by N or by N - 1: where the boundary comes
    after the save, the same step is still under way. So the next boundary decides, by whether something was trained
    since the save.
    """

    def __init__(self, trained: Callable[[], int]) -> None:
        self._trained = trained
        self.unit = UNKNOWN
        self.named: int | None = None
        """The step that the script named last by ``at``."""
        self._named_after = 0
        """Training boundaries before that."""
        self._version: int | None = None
        self._named_steps, self._misnamed = 0, ""
        """Version of a parameter when a step was named; how often it had changed under the present name."""
        self.by_batches = False
        """The unit was learned from the sampler's batches, and holds as long as there is one a boundary."""
        self._base_step, self._base_boundaries, self._base = 0, 0, trained()
        self._named_before = False
        self._named_at: int | None = None
        """Training steps at the call of ``at``, until the boundary after it has checked its place."""
        self._checked = self._too_early = self._named_trained = False
        self._save: tuple[int, int] | None = None
        """The last save that agreed with the count: its distance from it (0 or 1), and the training steps by then."""

    @property
    def since(self) -> int:
        """Training boundaries since the restore, or since the keeper was made."""
        return self._trained() - self._base

    @property
    def boundaries(self) -> int:
        """Training boundaries of all starts."""
        return self._base_boundaries + self.since

    @property
    def step(self) -> int | None:
        """Step of a checkpoint at this boundary; None if only the script itself can number it."""
        if self.named is not None:
            return None if self.outdated else self.named
        return self._base_step + self.since if self.unit == BOUNDARY else None

    @property
    def outdated(self) -> bool:
        """True where the script has named another step than the one at hand, such as each tenth or the last epoch."""
        return self.named is not None and self._trained() > self._named_after + 1

    @property
    def unknown(self) -> str:
        """The reason why no checkpoint can be ordered; "" if one can."""
        if self.unit != UNKNOWN:
            return ""
        return NOT_NAMED_AGAIN if self._named_before else NO_UNIT

    @property
    def misplaced(self) -> str:
        """The reason why the script's names cannot be used; "" if they can."""
        return NAMED_TOO_EARLY if self._too_early else self._misnamed

    @property
    def undecided(self) -> bool:
        """True while the next boundary has to decide what a save, or the name of a step, meant."""
        return self._save is not None or self._named_at is not None

    @property
    def unchecked(self) -> bool:
        """True until a boundary has shown that steps are named after their training."""
        return not self._checked

    def at(self, step: int, *, trained: bool = True, version: int = 0) -> None:
        """Take the script's own name of the step at hand; ``trained``: something was since the boundary before.

        Where nothing was, as between the steps of an accumulation, the boundary that follows cannot check the place.
        ``version`` is that of a parameter; where it changes twice under one name, the name is of several steps.
        """
        if step != self.named:
            self._named_steps = 0
            if self.named is not None and step < self.named:
                self._misnamed = NAMED_BACKWARDS
        self._named_steps += self._version is not None and version != self._version
        self._version = version
        if self._named_steps > 1:
            self._misnamed = self._misnamed or NAMED_TWICE
        self.unit, self.named, self._named_trained, self._named_after = NAMED, step, trained, self._trained()
        self._named_at = None if self._checked else self._named_after

    def restored(self, step: int, unit: str, boundaries: int) -> None:
        """Begin anew from a restored checkpoint."""
        self._base_step, self._base_boundaries, self._base = step, boundaries, self._trained()
        self._named_before, self._save, self._version = unit == NAMED, None, None
        self.unit = unit if unit in (BOUNDARY, OWN) else UNKNOWN
        self.named, self.by_batches = None, False

    def saved(self, step: int) -> None:
        """Compare a save of the script's own with the count of boundaries."""
        self._save = None
        if self.unit in (NAMED, OWN) or not self.since:
            return
        distance = step - (self._base_step + self.since)
        if distance in (0, 1):
            self._save = distance, self._trained()
        else:
            self._is_own()

    def decide(self, *, changed: bool) -> None:
        """Decide at the boundary after a save what it meant; ``changed``: something was trained in between.

        The step after N boundaries is N if a further one was trained after the save, or if its boundary was still to
        come and the save named N + 1. A step is named after its training, and before its boundary.
        """
        if self._named_at is not None:
            if self._trained() == self._named_at + 1:
                self._checked, self._too_early = changed or self._named_trained, changed
            self._named_at = None
        if self._save is None:
            return
        (distance, trained), self._save = self._save, None
        if self._trained() != trained + 1:  # a boundary in between went another way: nothing can be seen any more
            return
        if changed == (distance == 0):
            self.unit = BOUNDARY
        else:
            self._is_own()

    def follow(self, batches: int) -> None:
        """Compare the sampler's batches since the restore with the boundaries, one a step."""
        if self.unit == UNKNOWN and not self._named_before and self.since and batches == self.since:
            self.unit, self.by_batches = BOUNDARY, True
        elif self.by_batches and batches != self.since:
            self.unit, self.by_batches = UNKNOWN, False

    def _is_own(self) -> None:
        self.unit, self.by_batches = OWN, False
