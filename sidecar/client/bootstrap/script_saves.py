"""The script's own checkpoints: `cadenza run --saves` finds them on the disk, and a new one makes the job movable.

A small thread looks for them. A job may be moved for a while after each, and loses what it has trained since; with a
signal for the script's own handler it may be moved at any time, and loses next to nothing.
"""

from __future__ import annotations

import functools
import glob
import json
import logging
import os
import re
import signal
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cadenza.sidecar import wire
from cadenza.sidecar.client import clock
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.session.checkpoint_request import DEFERRED, Saved

if TYPE_CHECKING:
    from cadenza.sidecar.client.session.job_session import Session

SAVES_ENV = "CADENZA_SAVES"
"""Absolute pattern, directory or file of the script's checkpoints; set by `cadenza run --saves`."""
SIGNAL_ENV = "CADENZA_SAVE_SIGNAL"
"""Name of the signal at which the script saves, such as USR1; set by `cadenza run --save-signal`."""
LOOK_S = 0.5
"""Seconds between two looks; a checkpoint that two of them find alike is complete."""
WINDOW_S = 20.0
WINDOW_SHARE = 0.05
"""A job may be moved for so many seconds after a checkpoint, which is time for a round and an order, or for this share
of the time between two of its checkpoints; a crash loses half of that time on average."""
HANDLER_S = 120.0
"""Longest time from the signal until the script's checkpoint is complete."""
UNFINISHED = (".tmp", ".temp", ".part", ".partial", ".incomplete", "~")

_log = logging.getLogger("cadenza.client")


class Found(NamedTuple):
    """A checkpoint on the disk: a file, or a directory with all that is in it; ``stamp`` changes with its content."""

    path: str
    stamp: tuple[tuple[str, int, int, int], ...]

    def replaces(self, other: Found | None) -> bool:
        """Return whether it is a file that another one of the same name, which was complete, has made way for."""
        if other is None or len(self.stamp) != 1 or len(other.stamp) != 1 or self.path != other.path:
            return False
        return self.stamp[0][:2] != other.stamp[0][:2]

    @property
    def files(self) -> set[str]:
        """Names of a directory's files, without their numbers."""
        return {_unnumbered(one[0].removeprefix(self.path)) for one in self.stamp}

    @property
    def modified_s(self) -> float:
        """Epoch time of its last change."""
        return max((one[2] for one in self.stamp), default=0) / 1e9


def newest(pattern: str) -> Found | None:
    """Return the checkpoint that was changed last; unfinished ones, by their names, do not count."""
    return max(candidates(pattern), key=lambda one: (one.modified_s, one.path), default=None)


def newest_whole(pattern: str) -> Found | None:
    """Return the newest checkpoint that its process has not left half written, as where its node failed.

    A file in a format that tells its length has it, and a directory has all the files of the one before.
    """
    found = sorted(candidates(pattern), key=lambda one: (one.modified_s, one.path), reverse=True)
    for place, one in enumerate(found):
        before = next((other for other in found[place + 1 :] if _unnumbered(other.path) == _unnumbered(one.path)), one)
        if one.files >= before.files and all(_is_whole(Path(file[0])) for file in one.stamp):
            return one
        _log.warning("%s: is not whole, and the checkpoint before it is used", one.path)
    return None


def _unnumbered(name: str) -> str:
    """Return a name without its numbers."""
    return re.sub(r"\d+", "", name)


def _is_whole(path: Path) -> bool:
    """Return whether a file ends where its format says; most files of torch are zip archives."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            size = file.seek(0, os.SEEK_END)
            if path.suffix == ".safetensors" and size > len(head):
                begin = len(head) + int.from_bytes(head, "little")
                if begin > size:  # garbled, or cut off in its table: no memory is taken for what is not there
                    return False
                file.seek(len(head))
                tensors = json.loads(file.read(begin - len(head)))
                ends = [one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__"]
                return size == begin + max(ends, default=0)
        return not head.startswith(b"PK\3\4") or zipfile.is_zipfile(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return False


def candidates(pattern: str) -> Iterator[Found]:
    """Yield all checkpoints of a pattern, in a directory, or at a path."""
    if glob.has_magic(pattern):
        paths = glob.glob(pattern, recursive=True)  # noqa: PTH207 - the pattern is absolute
    else:
        paths = [str(path) for path in Path(pattern).iterdir()] if Path(pattern).is_dir() else [pattern]
    for path in paths:
        name = Path(path).name
        if not name.startswith(".") and not name.endswith(UNFINISHED) and ".tmp" not in name:
            stamp = tuple(sorted(_stamps(Path(path))))
            if sum(one[3] for one in stamp) and not any(one[0].endswith(UNFINISHED) for one in stamp):
                yield Found(path, stamp)


def _stamps(path: Path) -> Iterator[tuple[str, int, int, int]]:
    """Yield name, inode, time of change and size of each file of a checkpoint; of none that has just gone."""
    try:
        for file in path.rglob("*") if path.is_dir() else (path,):
            if file.is_file():
                status = file.stat()
                yield str(file), status.st_ino, status.st_mtime_ns, status.st_size
    except OSError:
        return


def _being_written(found: Found) -> bool:
    """Return whether this process has a file of a checkpoint open for writing."""
    names = {os.path.realpath(one[0]) for one in found.stamp}
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            if os.readlink(f"/proc/self/fd/{descriptor}") in names:  # noqa: PTH115
                flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
                if int(flags, 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
        except (OSError, IndexError, ValueError):
            continue
    return False


class ScriptSaves:
    """Follows the script's checkpoints in one session; the thread looks, and the boundary acts."""

    def __init__(self, session: Session, pattern: str, number: int = 0) -> None:
        self._session = session
        self._pattern = pattern
        self._none_yet = f"it has not saved to {pattern} since it started"
        self._signal = number
        self._last = newest(pattern)
        """The newest one that is complete; those that are there at the start are of an earlier one."""
        self._seen: Found | None = self._last
        self._at_ns = 0
        self._between_s = 0.0
        self._due_ns = 0
        """Time by which a checkpoint that was promised has to be complete; 0: none was."""
        self._answer: Saved | None = None
        self._step = 0
        self._closed = threading.Event()
        # Any boundary will do: its checkpoint is on the disk, or the script itself saves when it is signaled.
        self._registration = session.add_saver(self._save, lambda _: 0, unready=self._none_yet)
        session.looks.append(self._at_boundary)
        os.register_at_fork(after_in_child=self._closed.set)
        self._thread = threading.Thread(target=self._run, name="cadenza-saves", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Look once: note a new complete checkpoint, and whether the job may be moved with the last one."""
        found = newest(self._pattern)
        settled = found is not None and (found == self._seen or found.replaces(self._seen))
        complete = found is not None and settled and not _being_written(found)
        self._seen = found
        older = self._last is not None and found is not None and found.modified_s < self._last.modified_s
        if found is not None and complete and found != self._last and not older:  # the last one may have been removed
            now = monotonic_ns()
            self._between_s = (now - self._at_ns) / 1e9 if self._at_ns else 0.0
            self._last, self._at_ns, self._step = found, now, self._session.step
            if self._due_ns:
                self._answer = Saved(self._step, path=found.path, lost_s=self.lost_s)
        self._registration.tell(self._unready())
        # The handler saves at the order; without one the job goes back to the last checkpoint.
        self._session.words[wire.PAGE_LOST_MS] = 0 if self._signal else int(1000 * self.lost_s)
        if self._due_ns:
            self._session.memory_step = 0  # the next boundary answers, or gives the order back

    @property
    def lost_s(self) -> float:
        """Seconds of training since the last checkpoint."""
        return 0.0 if self._last is None else round(max(0.0, clock.wall_s() - self._last.modified_s), 1)

    def _unready(self) -> str:
        """Return why the job cannot be moved now; "" if it can."""
        who = self._session.who
        if who is not None and who.world_size > 1:
            return "it has several ranks, and `cadenza run --saves` is for one process"
        if self._signal:
            handled = signal.getsignal(self._signal) not in (signal.SIG_DFL, signal.SIG_IGN, None)
            return "" if handled else f"its script has no handler for {signal.Signals(self._signal).name}"
        if not self._at_ns:
            return self._none_yet
        window_s = max(WINDOW_S, WINDOW_SHARE * self._between_s)
        if (monotonic_ns() - self._at_ns) / 1e9 <= window_s:
            return ""
        return f"its last checkpoint is more than {window_s:.0f} s old; it can be moved after the next"

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            if self._session.active:
                try:
                    self.look()
                except OSError as error:
                    _log.debug("%s: %s", self._pattern, error)

    def _save(self) -> object:
        """Return the last checkpoint; with a signal, have the script's handler save one first."""
        if self._signal:
            self._answer, self._due_ns = None, monotonic_ns() + int(HANDLER_S * 1e9)
            # The handler runs here, at a boundary: a signal from outside could come in the middle of a step.
            signal.raise_signal(self._signal)
            return DEFERRED
        if self._last is None or newest(self._pattern) is None:
            return ""
        return Saved(self._step, path=self._last.path, lost_s=self.lost_s)

    def _at_boundary(self) -> None:
        """Answer the order whose checkpoint the script's handler has saved, or give it back."""
        answer, late = self._answer, 0 < self._due_ns < monotonic_ns()
        if answer is None and not late:
            return
        self._answer, self._due_ns = None, 0
        name = signal.Signals(self._signal).name
        if answer is None:
            reason = f"no new checkpoint in {self._pattern} was complete {HANDLER_S:.0f} s after {name}"
            self._session.checkpointed(error=reason)
        else:
            self._session.checkpointed(answer.path, answer.step, lost_s=answer.lost_s)


# --- what comes back -----------------------------------------------------------------------------------------


class _Opened:
    """Files of the script's checkpoints that this process has opened to read."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.saves: ScriptSaves | None = None
        self.expected: dict[str, Callable[[], None]] = {}
        """The paths of the receipt that were not opened yet, and what says that they are."""

    def opened(self, path: str) -> None:
        """Note an opened file, and that the job goes on from the checkpoint that it belongs to."""
        self.paths.add(path)
        for expected in [one for one in self.expected if path == one or path.startswith(one + os.sep)]:
            self.expected.pop(expected)()


_opened = _Opened()


def watch_opens(pattern: str) -> None:
    """Note from now on which files of the checkpoints this process opens to read (an audit hook, which stays)."""
    place = pattern
    while glob.has_magic(place):
        place = os.path.dirname(place)  # noqa: PTH120
    place = os.path.realpath(place)

    def hook(event: str, args: Any) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes)):
            return
        mode, flags = args[1], args[2]
        if "w" in (mode or "") or (isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY):
            return
        path = os.path.realpath(os.fsdecode(args[0]))
        if path == place or path.startswith(place + os.sep):
            _opened.opened(path)

    sys.addaudithook(hook)


def follow(session: Session) -> None:
    """Follow the script's checkpoints in a session that has just attached, and say what it was restored from."""
    pattern = os.environ.get(SAVES_ENV)
    if not pattern or _opened.saves is not None or not session.active:
        return
    name = os.environ.get(SIGNAL_ENV, "")
    _opened.saves = ScriptSaves(session, pattern, int(getattr(signal, f"SIG{name}")) if name else 0)
    receipt = session.arrival.receipt()
    if receipt is not None:
        step = receipt.step
        for path in receipt.paths:
            _opened.expected[os.path.realpath(path)] = functools.partial(session.restored, path, step)
        for path in sorted(_opened.paths):
            _opened.opened(path)
        for path in [one for one in _opened.expected if one.endswith(".safetensors")]:
            if any(path in os.path.realpath(word.rpartition("=")[2]) for word in sys.argv):
                _opened.opened(path)  # its library opens files past Python; the script was told this one
