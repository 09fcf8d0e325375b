"""Durations of a round's steps, taken where the round calls the gateway and the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cadenza.sidecar.clock import Clock


class StepTimes:
    """Seconds that each step of the present round has taken so far."""

    def __init__(self, clock: Clock) -> None:
        self.seconds: dict[str, float] = {}
        self._clock = clock

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the time of a block to a step."""
        began_s = self._clock.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock.monotonic() - began_s

    def timed(self, inner: Any, steps: Mapping[str, str]) -> Any:
        """Return an object that passes everything on to ``inner``; ``steps``: the step of each method that is timed."""
        return _Timed(inner, self, steps)


class _Timed:
    def __init__(self, inner: Any, times: StepTimes, steps: Mapping[str, str]) -> None:
        self._inner, self._times, self._steps = inner, times, steps

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)
        if name not in self._steps:
            return method

        def call(*arguments: Any) -> Any:
            with self._times.step(self._steps[name]):
                return method(*arguments)

        return call
