"""Two commands on the same CPUs and GPU: how fast each is beside the other, of its speed alone; for packing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from cadenza.profiler.measure.agent_stub import Board
from cadenza.profiler.measure.cpu_limits import Limit, own_cpus
from cadenza.profiler.measure.gpu_use import visible
from cadenza.profiler.measure.point import Ended, Point, Probe, Rule
from cadenza.profiler.measure.reaper import Leash
from cadenza.profiler.measure.training_command import Run, own_caches, surroundings
from cadenza.sidecar.clock import Clock

COLUMNS = "model,other,speed,other_speed"


class Side(NamedTuple):
    """One of the two: its model's name and its command."""

    model: str
    words: tuple[str, ...]


class Pair(NamedTuple):
    """What was measured; times are seconds a step."""

    model: str
    other: str
    alone_s: tuple[float, float]
    together_s: tuple[float, float]

    @property
    def speeds(self) -> tuple[float, float]:
        """Return each one's speed beside the other, of its speed alone; at most 1, as noise may say more."""
        alone, together = self.alone_s, self.together_s
        return min(1.0, alone[0] / together[0]), min(1.0, alone[1] / together[1])

    @property
    def gain(self) -> float:
        """Return the throughput of both together over that of taking turns: above 1 packing pays."""
        return sum(self.speeds)

    def row(self) -> str:
        """Return the line of an interference table (``--interference`` of ``cadenza simulate``)."""
        first, second = self.speeds
        return f"{self.model},{self.other},{first:.4f},{second:.4f}"


def measure(sides: Sequence[Side], log: Path, clock: Clock, rule: Rule) -> Pair:
    """Measure each command alone, then both at once, all with every CPU that this process may use.

    Raises CommandFailedError when a command fails, or ends before it is measured.
    """
    alone = []
    for side in sides:
        with _running(side, log, clock, rule) as probe:
            alone.append(_point(probe).iteration_s)
    with ExitStack() as stack:
        probes = [stack.enter_context(_running(side, log, clock, rule, beside=at)) for at, side in enumerate(sides, 1)]
        together = [_point(probe).iteration_s for probe in probes]
    first, second = sides
    return Pair(first.model, second.model, (alone[0], alone[1]), (together[0], together[1]))


def _point(probe: Probe) -> Point:
    """Return one measurement with all CPUs."""
    try:
        return probe.point(float(len(own_cpus())))
    except Ended:
        raise probe.run.failure("it ended before it was measured: let it train for longer") from None


@contextmanager
def _running(side: Side, log: Path, clock: Clock, rule: Rule, *, beside: int = 0) -> Iterator[Probe]:
    """Start a command, wait for its first steps, and end it afterwards; ``beside`` numbers those that run together."""
    cpus = own_cpus()
    board = Board()
    board.tune(len(cpus))
    leash = Leash(board.path, caches=own_caches(beside))
    try:
        environ = surroundings(board.path, len(cpus), None, number=beside)
        run = Run(side.words, Limit(cpus, None), environ, log)
        try:
            probe = Probe(board, run, clock, rule, visible(), alone=not beside)
            probe.ready()
            yield probe
        except Ended:
            raise run.failure("it ended before it was measured: let it train for longer") from None
        finally:
            run.end()
    finally:
        leash.close()
        board.close()
