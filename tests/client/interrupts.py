"""Interrupts of the main thread at a chosen line; CPython runs no handler between a lock and its "with"."""

from __future__ import annotations

import contextlib
import dis
import gc
import linecache
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self

CLIENT = "cadenza.sidecar.client."


class Interrupted(BaseException):
    """Raised by the handler of SIGUSR1."""


def raising(number: int, frame: FrameType | None) -> None:
    raise Interrupted


@contextlib.contextmanager
def raising_handlers() -> Iterator[None]:
    """Give SIGUSR1 a handler that raises, and SIGINT the interpreter's, which raises KeyboardInterrupt."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT)}
    signal.signal(signal.SIGUSR1, raising)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
        assert signal.getsignal(signal.SIGUSR1) is raising
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ends_with(frame: FrameType) -> bool:
    """Return whether a frame is about to leave a ``with``: its line comes again, to call ``__exit__(None, …)``."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return line.startswith("with ") and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "LOAD_CONST"


class Instructions:
    """Count of the lines of functions called within; before the one of number ``at``, a signal arrives.

    Where that line is the end of a ``with``, it arrives before the next one: a trace stops there, and no handler runs.

    With ``moves``, only the client's own lines count, without those that hold signals back: most of a move's
    others belong to that. No garbage is collected within: an exception in a finalizer of an earlier object leaves no
    call.
    """

    def __init__(self, at: int = -1, number: int = signal.SIGUSR1, *, moves: bool = False) -> None:
        self.count = 0
        self._at, self._number, self._moves = at, number, moves
        self._sent = 0
        self._before: Any = None
        self._collecting = False

    def __enter__(self) -> Self:
        self._collecting = gc.isenabled()
        gc.disable()
        self._before = sys.gettrace()
        sys.settrace(self._follow)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)
        if self._collecting:
            gc.enable()

    def _follow(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_globals["__name__"]
        if frame.f_code is Instructions.__exit__.__code__ or (
            self._moves and (not name.startswith(CLIENT) or name.endswith(".held_signals"))
        ):
            return None
        if event == "line":
            self.count += 1
            if self.count >= self._at > self._sent and not _ends_with(frame):
                self._sent = self._at
                signal.raise_signal(self._number)
        return self._follow
