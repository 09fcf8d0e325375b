"""Two commands on the same CPUs and GPU: the speed of each next to the other, relative to its speed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from cadenza.profiler.measure.agent_stub import AgentStub
from cadenza.profiler.measure.cpu_limits import Limit, own_cpus
from cadenza.profiler.measure.gpu_use import visible
from cadenza.profiler.measure.point import Ended, Point, Probe, Rule
from cadenza.profiler.measure.reaper import Reaper
from cadenza.profiler.measure.training_command import Run, own_caches, surroundings
from cadenza.sidecar.clock import Clock

COLUMNS = "model,other,speed,other_speed"


class Side(NamedTuple):
    """One of the two: its model's name and its command."""

    model: str
    words: tuple[str, ...]


class Pair(NamedTuple):
    """The measurement of a pair; times are seconds a step."""

    model: str
    other: str
    alone_s: tuple[float, float]
    together_s: tuple[float, float]

    @property
    def speeds(self) -> tuple[float, float]:
        """Return the speed of each next to the other, relative to its speed alone; at most 1."""
        alone, together = self.alone_s, self.together_s
        return min(1.0, alone[0] / together[0]), min(1.0, alone[1] / together[1])

    @property
    def gain(self) -> float:
        """Return the throughput of both together over that of taking turns: above 1 packing pays."""
        return sum(self.speeds)

    def row(self) -> str:
        """Return the line of an interference table (``--set interference`` of ``cadenza simulate``)."""
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
        probes = [stack.enter_context(_running(side, log, clock, rule, number=at)) for at, side in enumerate(sides, 1)]
        together = [_point(probe).iteration_s for probe in probes]
    first, second = sides
    return Pair(first.model, second.model, (alone[0], alone[1]), (together[0], together[1]))


def _point(probe: Probe) -> Point:
    try:
        return probe.point(float(len(own_cpus())))
    except Ended:
        raise probe.run.failure("it ended before it was measured: let it train for longer") from None


@contextmanager
def _running(side: Side, log: Path, clock: Clock, rule: Rule, *, number: int = 0) -> Iterator[Probe]:
    """Start a command, wait for its first steps, and end it afterwards; ``number`` tells concurrent commands apart."""
    cpus = own_cpus()
    stub = AgentStub()
    stub.tune(len(cpus))
    reaper = Reaper(stub.path, caches=own_caches(number))
    try:
        environ = surroundings(stub.path, len(cpus), None, number=number)
        run = Run(side.words, Limit(cpus, None), environ, log)
        try:
            probe = Probe(stub, run, clock, rule, visible(), alone=not number)
            probe.ready()
            yield probe
        except Ended:
            raise run.failure("it ended before it was measured: let it train for longer") from None
        finally:
            run.end()
    finally:
        reaper.close()
        stub.close()
