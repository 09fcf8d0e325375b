"""The savers of a session: everything that must be on the disk before a job can be moved, and what each can do now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from cadenza.sidecar import wire
from cadenza.sidecar.client.session import checkpoint_request
from cadenza.sidecar.client.session.checkpoint_request import DEFERRED, NO_CHECKPOINT, Saved, Saver

AtEpochEnd = Optional[Callable[[], bool]]


class Registration:
    """One saver of a session; its owner says whether it can save now, and withdraws it."""

    def __init__(self, savers: Savers, save: Saver, *, away: bool, own_saves: bool) -> None:
        self._savers, self.save = savers, save
        self.away = away
        """It can also save while the state is in host memory, where torch reads the host copy."""
        self.at_epoch_end: AtEpochEnd = None
        """Returns True at the last batch of an epoch, whose own work is still to come; None: not known."""
        self.in_batches: Callable[[], bool] = bool
        """Returns True while the training takes its batches from a loader that calls ``Session.next_batch``."""
        self.after_evaluation = False
        """It saves only after an evaluation that follows the boundary, or says in ``at_epoch_end`` that one follows."""
        self.anywhere = False
        """Any boundary will do: its checkpoint is on the disk, or the script itself saves when it is signaled."""
        self.watched: object = ()
        """Optimizers, else modules, whose gradients must be used up where it saves, or a function that returns them."""
        self.unready = NO_CHECKPOINT
        """The reason, a sentence, while it is not ready."""
        self._ready, self._own_saves = True, own_saves

    @property
    def ready(self) -> bool:
        """False: nothing is ordered from this job."""
        return self._ready

    @ready.setter
    def ready(self, ready: bool) -> None:
        self._ready = ready
        self._savers.changed()

    @property
    def own_saves(self) -> bool:
        """True: an ordered checkpoint is taken only where the script itself saves; see ``Session.own_save``."""
        return self._own_saves

    @own_saves.setter
    def own_saves(self, own_saves: bool) -> None:
        self._own_saves = own_saves
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

    def add(self, save: Saver, *, away: bool = False, own_saves: bool = False) -> Registration:
        """Add a saver; every one of them must succeed for a checkpoint."""
        registration = Registration(self, save, away=away, own_saves=own_saves)
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
        away = all(one.away and not one.own_saves for one in self._all)
        return wire.SAVES_AWAY if away else wire.SAVES_AT_BOUNDARY

    @property
    def refusal(self) -> str:
        """The reason why nothing can be saved; "" if it can."""
        if not self._all:
            return NO_CHECKPOINT
        return next((one.unready for one in self._all if not one.ready), "")

    @property
    def at_epoch_end(self) -> bool:
        """True at the last batch of an epoch that one of them knows."""
        return any(one.at_epoch_end is not None and one.at_epoch_end() for one in self._all)

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
