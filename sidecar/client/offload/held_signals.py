"""Hold of Python's signal handlers: none runs, and so none raises, between two lines of a move."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Optional

Handler = Callable[[int, Optional[FrameType]], object]


class HeldSignals:
    """Context in which Python's signal handlers wait; at its end they run in the order of their signals.

    Python runs handlers on the main thread, between any two instructions (library: signal), so other threads have
    none to hold. A signal without a Python handler keeps its effect. An object serves one ``with``; contexts nest.
    """

    def __init__(self) -> None:
        self._holding = False
        self._replaced: dict[int, tuple[Handler, Handler]] = {}
        """The handler of each signal, and the one in its place."""
        self._arrived: list[tuple[Handler, int, FrameType | None]] = []

    def __enter__(self) -> None:
        """Replace the handlers; until all are replaced each still runs at once, and its exception leaves this call."""
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    replacement = functools.partial(self._take, handler)
                    self._replaced[number] = handler, replacement
                    signal.signal(number, replacement)
            self._holding = True
        except BaseException:
            self._put_back()
            raise

    def __exit__(self, *error: object) -> None:
        """Put the handlers back and run those that waited; their exceptions leave this call."""
        # From the first assignment on handlers may raise again: what is left to do stands in the "finally".
        try:
            self._holding = False
            self._put_back()
        finally:
            try:
                self._put_back()
            finally:
                self._run_waiting()

    def _take(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        """Note a signal, or run its handler at once outside the context."""
        if self._holding:
            self._arrived.append((handler, number, frame))
        else:
            handler(number, frame)

    def _put_back(self) -> None:
        """Put back each handler whose replacement is still in its place."""
        for number, (handler, replacement) in self._replaced.items():
            if signal.getsignal(number) is replacement:
                signal.signal(number, handler)

    def _run_waiting(self) -> None:
        """Run the handlers that waited, the later ones also after one that raised."""
        try:
            while self._arrived:
                handler, number, frame = self._arrived.pop(0)
                handler(number, frame)
        finally:
            if self._arrived:
                self._run_waiting()
