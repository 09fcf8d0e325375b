"""What a page is made of: files as they were saved, grouped to results, and what was found by comparing them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from cadenza.policies.simulator.result_file import SweepPoint
from cadenza.policies.simulator.run_values import JobResult, Sample

Verdict: TypeAlias = Literal["better", "worse", "more", "less", "same", "unclear", ""]
"""How a figure stands to the baseline's; "" where there is none to compare, "unclear" within the 95 % interval."""


@dataclass(frozen=True)
class Run:
    """One simulation with one seed."""

    source: str
    """The file, as it was named."""
    seed: int | None
    jobs: tuple[JobResult, ...]
    """Those whose completion is counted: all, or the window's."""
    samples: tuple[Sample, ...]
    gpus: int
    cpus: int
    end_s: float
    summary: Mapping[str, float]
    """Figures by the names and in the units of the file, without nesting; those that it lacks are not there."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """The class (image, language, …) of each model, where it is known."""


@dataclass(frozen=True)
class Loaded:
    """One file: a run for each seed, or the points of a load sweep, or both."""

    source: str
    label: str
    arguments: tuple[str, ...]
    runs: tuple[Run, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()


@dataclass(frozen=True)
class Result:
    """What the page compares: all files of one label."""

    label: str
    files: tuple[Loaded, ...]
    runs: tuple[Run, ...]
    """In order of their seeds."""
    index: int
    """Position on the page, which decides colour and line style; the baseline has 0."""

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Return the seeds in order of the runs."""
        return tuple(run.seed for run in self.runs)

    @property
    def sweep(self) -> tuple[SweepPoint, ...]:
        """Return the points of all its sweeps."""
        return tuple(point for file in self.files for point in file.sweep)


class Estimate(NamedTuple):
    """A mean over ``n`` seeds and half its 95 % interval, None of a single one."""

    mean: float
    half: float | None
    n: int


class Cell(NamedTuple):
    """One figure of one result; ``estimate`` is None where there is none, ``ratio`` is to the baseline's mean."""

    estimate: Estimate | None
    ratio: float | None = None
    verdict: Verdict = ""


class PairedSpeedUp(NamedTuple):
    """Baseline JCT over this result's, ascending, for jobs that ended in both; the number that was not paired."""

    ratios: tuple[float, ...]
    unpaired: int


class Slice(NamedTuple):
    """The jobs of one kind: its name, each result's number of them, and each result's mean JCT in hours."""

    name: str
    jobs: tuple[int, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that a page shows, before it is drawn."""

    results: tuple[Result, ...]
    """The baseline first."""
    cells: Mapping[str, tuple[Cell, ...]]
    """By metric key, in the results' order."""
    speed_ups: Mapping[str, PairedSpeedUp]
    """By label; not for the baseline."""
    by_gpus: tuple[Slice, ...]
    by_model: tuple[Slice, ...]
    by_class: tuple[Slice, ...]
    notes: tuple[str, ...]
    """What the reader must know before believing a comparison."""

    @property
    def baseline(self) -> Result:
        """Return the result to which all others are compared."""
        return self.results[0]

    def figure(self, key: str, result: Result) -> Cell | None:
        """Return one figure of one result, None where there is none."""
        cells = self.cells.get(key)
        return cells[result.index] if cells and cells[result.index].estimate else None

    def mean(self, key: str, result: Result) -> float | None:
        """Return one figure's mean over seeds in the unit of the file, None where there is none."""
        found = self.figure(key, result)
        return found.estimate.mean if found and found.estimate else None
