"""A job's way from its GPUs to the next ones: the lines on its output, and the check that what was saved comes back.

The receipt of a requested checkpoint, its paths and its step, travels with the requeue: from the agent to the service,
and to the agent of the next start, which tells this process. A restore that finds less is an error, and a job that
trains without having restored is reported, and never moved again.

The lines go to the standard error, as the client's warnings do: a script's standard output may be data that others
read, and Slurm writes both into the job's output file by default.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import LostCheckpointError
from cadenza.sidecar.client.session.identity import Identity, here

WORD_S = 10.0
"""Longest wait for the agent's word on a receipt, which it has from the service."""
MAX_PATH = 1000

_log = logging.getLogger("cadenza.client")
_settled: set[tuple[int, int]] = set()
"""Starts of jobs that this process has settled in a session that is over."""


@dataclass(frozen=True)
class Receipt:
    """The requested checkpoint that a job was requeued with."""

    job: int
    restart: int
    """First start that has to find it, or a later one of the same job."""
    step: int
    paths: tuple[str, ...]
    """Absolute, one of each saver; empty if they could not be named."""

    def __str__(self) -> str:
        """Name the checkpoint."""
        return f"the checkpoint of step {self.step}" + (f" in {', '.join(self.paths)}" if self.paths else "")


class Arrival:
    """One rank's departure with a checkpoint, and its arrival in the next start of its job.

    ``send`` sends a message to the agent and returns False without one; ``wake`` has the next boundary call
    ``at_boundary``. Both may be called from any thread.
    """

    def __init__(self, send: Callable[..., bool], wake: Callable[[], None]) -> None:
        self._send, self._wake = send, wake
        self.back_s: float | None = None
        """Time from the checkpoint of the move until this start went on from it; None if it was not just moved."""
        self._who: Identity | None = None
        self._word = threading.Condition()
        self._known = False
        self._receipt: Receipt | None = None
        self._away_s = 0.0
        self._told_ns = 0
        self._restored: list[tuple[str, int]] = []
        self._found: set[str] = set()
        """Checkpoints of the receipt that were restored."""
        self._meant = False
        """The script itself has named another one."""
        self._elsewhere = ""
        """The fault of what a keeper has found in another folder; an earlier stage's, if the receipt's comes yet."""
        self._arrived = False
        self._trained = False
        self._done = False
        self._goal: tuple[int, str] = (0, "")
        """Order, and what the job does when its checkpoint is complete, as a predicate."""
        self._leaving = 0
        """Order for which the job has said that it leaves."""

    # --- the agent's word ----------------------------------------------------------------------------------

    def begin(self, who: Identity) -> None:
        """Expect the receipt of this start."""
        self._who = who
        self._done |= (who.job, who.restart) in _settled

    def end(self) -> None:
        """Note that this process has settled its arrival, for a session that follows."""
        if self._done and self._who is not None:
            _settled.add((self._who.job, self._who.restart))

    def heed(self, message: dict[str, Any]) -> bool:
        """Take in a message of the agent, in the link's thread; return True if no boundary waits for it."""
        if message["type"] == "note":
            _log.warning("%s", message.get("text"))
            return True
        if message["type"] in ("commit", "save"):
            self._goal = int(message.get("order", 0)), str(message.get("goal", ""))
        if message.get("receipt") is None or message["type"] not in ("attached", "receipt"):
            return False
        with self._word:
            if not self._done:
                self._take(message["receipt"])
            self._known = True
            self._word.notify_all()
        self._wake()
        return bool(message["type"] == "receipt")

    def _take(self, fields: object) -> None:
        """Take in a receipt, which the agent has checked; an empty one says that there is none."""
        if not isinstance(fields, dict) or self._who is None or "step" not in fields:
            return
        paths = tuple(map(str, fields.get("paths", ())))
        self._receipt = Receipt(self._who.job, int(fields.get("restart", 0)), int(fields["step"]), paths)
        self._away_s, self._told_ns = float(fields.get("away_s", 0.0)), monotonic_ns()

    def receipt(self) -> Receipt | None:
        """Return the checkpoint that this start of the job has to find; None: it has to find none, as far as is known.

        Where the job was started again, waits for the agent's word.
        """
        who = self._who
        if who is None or who.restart == 0:
            return None
        with self._word:
            if not self._known and not self._word.wait_for(lambda: self._known, WORD_S):
                self._known = True  # one wait is enough; a word that comes later counts all the same
            return self._receipt

    # --- restoring -----------------------------------------------------------------------------------------

    def check(self, directory: object, found: object, step: int | None) -> None:
        """Raise LostCheckpointError if ``found``, the newest checkpoint in a directory, is not what has to come back.

        ``found`` is None where there is none. Where nothing is known of a receipt, a job that was started again and
        finds nothing says so.
        """
        receipt, who = self.receipt(), self._who or here()
        if receipt is not None and not self._done and not self._meant:
            if loss := self._loss(receipt, directory, found, step):
                loss += (
                    ". Mend the directory, or submit the job anew; a script that means to go on from something else "
                    "calls session.restored(path, step) before restore(), and its job is not moved again"
                )
                if found is None or not self._may_be_of_earlier_stage(receipt, directory):
                    raise LostCheckpointError(loss)
                self._elsewhere = loss
        elif found is None and who is not None and who.restart > 0 and not self._restored:
            _log.warning(
                "job %d was started again (restart %d), and there is no checkpoint in %s: it begins from nothing",
                who.job, who.restart, directory,
            )  # fmt: skip

    def _loss(self, receipt: Receipt, directory: object, found: object, step: int | None) -> str:
        """Return the fault of a checkpoint that was found, or of none; "" if it is the receipt's or a later one.

        Once one of the receipt is restored, a directory that is not in it may have anything: its saver came later.
        """
        ordered = {os.path.realpath(path) for path in receipt.paths}
        place = os.path.realpath(str(directory))
        if self._found and place not in {_folder(path) for path in ordered}:
            return ""
        if found is None:
            return f"job {receipt.job} was requeued with {receipt}, and there is no checkpoint in {place}"
        path = os.path.realpath(str(found))
        if not ordered or path in ordered or any(self._follows(receipt, path, step, one) for one in ordered):
            return ""
        return f"job {receipt.job} was requeued with {receipt}, and this start found {path} (step {step})"

    def _may_be_of_earlier_stage(self, receipt: Receipt, directory: object) -> bool:
        """Return whether a script with a keeper and a folder for each stage may come to the receipt's keeper yet."""
        folders = {_folder(os.path.realpath(path)) for path in receipt.paths}
        others = os.path.realpath(str(directory)) not in folders
        return others and bool(folders) and all(os.path.exists(path) for path in receipt.paths)  # noqa: PTH110

    def _follows(self, receipt: Receipt, path: str, step: int | None, ordered: str) -> bool:
        """Return True if a checkpoint is a later one than an ordered one: by its name there, else by its step."""
        further = step is not None and step >= receipt.step
        if _folder(path) == _folder(ordered):
            numbers, before = _numbers(Path(path).name), _numbers(Path(ordered).name)
            return numbers > before if numbers and before else further
        if re.sub(r"\d+", "", path) == re.sub(r"\d+", "", ordered):
            return further and _numbers(path) > _numbers(ordered)
        later = self._who is not None and self._who.restart > receipt.restart
        return later and step is not None and step > receipt.step

    def restored(self, path: object, step: int) -> None:
        """Note that this rank goes on from a checkpoint; every rank says so before its first training boundary."""
        real, receipt = os.path.realpath(str(path)), self.receipt()
        if receipt is not None:
            self._meant |= bool(self._loss(receipt, _folder(real), real, step)) and not self._elsewhere
            self._found |= {real} & set(map(os.path.realpath, receipt.paths))
        self._restored.append((real, step))
        self._settle()

    def at_boundary(self) -> None:
        """Note a training boundary: by then a rank that has to restore has done so, or is reported."""
        if not self._done:
            if self._elsewhere and not self._found:
                raise LostCheckpointError(self._elsewhere)
            self._trained = True
            self._settle()

    def _settle(self) -> None:
        """Tell the agent and the job's output how this rank has arrived, as soon as that is known."""
        with self._word:
            receipt, who = self._receipt, self._who
            if self._done or who is None:
                return
            if receipt is None:
                self._done = self._trained and (self._known or who.restart == 0)
                return
            self._done = self._trained
        # 1. It has restored what it was requeued with, or something later.
        good = [one for one in self._restored if not self._loss(receipt, _folder(one[0]), *one)]
        if good and not self._arrived:
            self._arrived = True
            path, step = good[-1]
            self._send("restored", path=path[:MAX_PATH], step=step)
            self._announce(receipt, step)
        # 2. It trains without.
        if self._trained and not good:
            reason = f"it trains without having restored {receipt}"
            if self._restored:
                path, step = self._restored[-1]
                reason = f"it goes on from step {step} ({path}) instead of {receipt}"
            self._send("unrestored", reason=reason[: 2 * MAX_PATH])
            _log.warning(
                "job %d was moved, and %s: it is not moved again. Call restore() on every rank before the first "
                "boundary, or session.restored(path, step) after a load of your own", who.job, reason,
            )  # fmt: skip

    # --- lines on the job's output -------------------------------------------------------------------------

    def _announce(self, receipt: Receipt, step: int) -> None:
        """Say where the job goes on, and after which time, if it has just been moved."""
        if self._who is None or self._who.rank:
            return
        away_s = self._away_s + (monotonic_ns() - self._told_ns) / 1e9
        moved = self._away_s > 0 and receipt.restart == self._who.restart
        self.back_s = away_s if moved else None
        say(f"continues at step {step}" + (f" after {away_s:.0f} s" if moved else ""))

    def leaves(self, order: int, answer: dict[str, Any]) -> None:
        """Say that this job leaves its GPUs with the checkpoint of an order, before the agent hears of it."""
        number, goal = self._goal
        if self._who is None or self._who.rank or number != order or not goal or answer["error"]:
            return
        self._leaving = order
        took = f" in {answer['seconds']:.1f} s" if answer["seconds"] else ""
        say(
            f"{goal}; checkpoint of step {answer['step']} saved{took}; comes back by itself "
            f"(`cadenza why {self._who.job}`)"
        )

    def stays(self, order: int, reason: object) -> None:
        """Say that the job does not leave after all, if it has said that it does."""
        if self._leaving and self._leaving == order:
            say(f"goes on: {reason or 'it need not leave'}")
        self._leaving = 0


def say(text: str) -> None:
    """Write a line on the job's output at once; a closed one is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"cadenza: {text}\n")
        sys.stderr.flush()


def _folder(path: str) -> str:
    return str(Path(path).parent)


def _numbers(text: str) -> tuple[int, ...]:
    """Return all numbers of a name.

    >>> _numbers("step-00000120.2") > _numbers("step-00000120")
    True
    """
    return tuple(map(int, re.findall(r"\d+", text)))
