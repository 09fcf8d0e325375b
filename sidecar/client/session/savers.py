"""The savers of a session: everything that must be on the disk before a job can be moved, and what each can do now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.session import checkpoint_request
from cadenza.sidecar.client.session.checkpoint_request import DEFERRED, NO_CHECKPOINT, Saved, Saver

BEFORE_NEXT_BATCH = -1
"""A saver's answer at a boundary: it can save once the rest of the step is done, in ``Session.next_batch``."""


@dataclass(frozen=True)
class Place:
    """A boundary, as a saver sees it that is asked whether a checkpoint can be taken there."""

    training: bool
    """It ends a training step; False in an evaluation."""
    in_step: bool
    """It is inside an optimizer's step, before the rest of the script's own step, as those of `cadenza run` are."""
    own: Mapping[Registration, Saver] | None
    """The script's own saves since the last step, where the boundary is at one of them; else None."""
    evaluates_next: bool
    """An evaluation follows, if they come after equal numbers of steps."""
    end_passed: bool
    """A last batch of an epoch was passed already: the epochs may have no other save point."""
    stays: bool
    """The job has yielded here, so that it cannot go on to a better boundary."""
    gradients: Callable[[], int]
    """Returns ``PASSED_GRADIENTS`` or ``PASSED_UNKNOWN_GRADIENTS`` if some may be pending, else 0."""

    def obstacle(
        self, *, at_epoch_end: bool = False, before_next_batch: bool = False, after_evaluation: bool = False
    ) -> int:
        """Return the obstacle for a saver that needs all of a step, as ``PASSED_…``; 0 if there is none.

        ``at_epoch_end``: this was the last batch of an epoch, whose own work is still to come. ``before_next_batch``:
        the training takes its batches from a loader that calls ``Session.next_batch``, which can save later.
        ``after_evaluation``: it saves only after an evaluation that follows, or says ``at_epoch_end`` of its step.
        """
        if self.own is not None:
            return 0
        if self.in_step or not self.training:
            return wire.PASSED_UNTIL_OWN_SAVE if self.in_step else wire.PASSED_EVALUATION
        if pending := self.gradients():
            return pending
        if self.evaluates_next and (self.stays or not (before_next_batch or after_evaluation)):
            return wire.PASSED_EVALUATION
        if at_epoch_end and not self.end_passed and not self.stays:
            return wire.PASSED_EPOCH_END
        return BEFORE_NEXT_BATCH if before_next_batch and not self.stays else 0

    def own_save(self, registration: Registration) -> int:
        """Return the obstacle for a saver that can save only where the script itself has just saved by it."""
        return 0 if self.own is not None and registration in self.own else wire.PASSED_UNTIL_OWN_SAVE


Question = Callable[[Place], int]
"""May a checkpoint be taken at this boundary? 0, BEFORE_NEXT_BATCH, or why not, as ``PASSED_…``."""


class Registration:
    """One saver of a session; its owner tells what it can do now, and withdraws it."""

    def __init__(self, savers: Savers, save: Saver, may: Question, holds: object, *, away: bool, unready: str) -> None:
        self._savers, self.save, self.may, self.holds = savers, save, may, holds
        self.away, self.unready = away, unready

    @property
    def ready(self) -> bool:
        """False: nothing is ordered from this job."""
        return not self.unready

    def tell(self, unready: str, *, away: bool | None = None) -> None:
        """Say why nothing can be saved now, "" if it can, and whether it can also be while the state is away."""
        away = self.away if away is None else away
        if (unready, away) != (self.unready, self.away):
            self.unready, self.away = unready, away
            self._savers.changed()

    def withdraw(self) -> None:
        """Remove this saver, and no other."""
        self._savers.remove(self)


class Savers:
    """The registrations of a session; ``changed`` is called when what they can do has changed."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._all: list[Registration] = []
        self.changed = changed

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Registration]:
        return iter((*self._all,))

    def add(self, save: Saver, may: Question, holds: object, *, away: bool, unready: str) -> Registration:
        """Add a saver; every one of them must succeed for a checkpoint."""
        registration = Registration(self, save, may, holds, away=away, unready=unready)
        self._all.append(registration)
        self.changed()
        return registration

    def remove(self, registration: Registration) -> None:
        """Remove one of them; one that is not there any more is no error."""
        if registration in self._all:
            self._all.remove(registration)
            self.changed()

    def clear(self) -> None:
        """Remove all."""
        self._all.clear()
        self.changed()

    @property
    def able(self) -> int:
        """The wire's ``SAVES_…`` of the weakest, or 0 if there is none or one is not ready."""
        if not self._all or not all(one.ready for one in self._all):
            return 0
        return wire.SAVES_AWAY if all(one.away for one in self._all) else wire.SAVES_AT_BOUNDARY

    @property
    def refusal(self) -> str:
        """The reason why nothing can be saved; "" if it can."""
        if not self._all:
            return NO_CHECKPOINT
        return next((one.unready for one in self._all if one.unready), "")

    def may(self, place: Place) -> int:
        """Ask all of them whether a checkpoint can be taken at a boundary; return the answer of all."""
        answers = [one.may(place) for one in self]
        refused = [answer for answer in answers if answer > 0]
        if wire.PASSED_UNTIL_OWN_SAVE in refused:
            return wire.PASSED_UNTIL_OWN_SAVE
        return min(refused or answers, default=0)

    def save(self, step: int, own: Mapping[Registration, Saver] | None = None) -> Collected:
        """Have every one save; ``own`` returns what the script itself has just saved. The first failure ends it."""
        collected = Collected(step)
        for one in self:
            collected.take(checkpoint_request.call((own or {}).get(one, one.save), step))
            if collected.error:
                break
        return collected


class Collected:
    """The checkpoints of one order so far, and the number of those that frameworks have promised."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.saved: list[Saved] = []
        self.promised = 0
        self.error = ""

    def take(self, result: object) -> None:
        """Add what a saver said: a Saved, DEFERRED, or a text with the reason why there is none."""
        if result is DEFERRED:
            self.promised += 1
        elif isinstance(result, Saved):
            self.step = result.step if not self.saved else self.step
            self.saved.append(result)
        else:
            self.error = self.error or str(result)

    def keep(self, result: object) -> None:
        """Add what became of a promised one; a failure is that of all."""
        self.promised -= 1
        self.take(result)
        self.promised = 0 if self.error else self.promised

    @property
    def missing(self) -> str:
        """A path that a saver named and at which there is nothing; "" if there is none."""
        if self.error:
            return ""
        return next((one.path for one in self.saved if not Path(one.path).exists()), "")

    def fields(self, seconds: float) -> dict[str, Any]:
        """Return the fields of a ``checkpointed`` message."""
        if self.error:
            return checkpoint_request.failure(self.step, self.error, seconds)
        paths, nbytes = [one.path for one in self.saved], sum(one.nbytes for one in self.saved)
        lost_s = max((one.lost_s for one in self.saved), default=0.0)
        done = {"step": self.step, "bytes": nbytes, "seconds": seconds, "paths": paths, "error": ""}
        return {**done, "lost_s": lost_s} if lost_s else done
