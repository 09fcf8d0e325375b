"""Contents of a page: saved files, grouped to results, and the comparison of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from cadenza.policies.simulator.result_file import SweepPoint
from cadenza.policies.simulator.run_values import JobResult, Sample

Verdict: TypeAlias = Literal["better", "worse", "more", "less", "same", "unclear", ""]
"""A figure compared with the baseline's; "" without a comparison, "unclear" within the 95 % interval."""


@dataclass(frozen=True)
class Run:
    """One simulation with one seed."""

    source: str
    """Path of the file as given."""
    seed: int | None
    jobs: tuple[JobResult, ...]
    """Jobs whose completion counts: all, or those of the window."""
    samples: tuple[Sample, ...]
    gpus: int
    cpus: int
    end_s: float
    summary: Mapping[str, float]
    """Figures of the file by name, without nesting, in the units of the file."""
    classes: Mapping[str, str] = field(default_factory=dict)
    """Class (image, language, …) of each model with a known class."""


@dataclass(frozen=True)
class Loaded:
    """One file: a run for each seed, or the points of a load sweep, or both."""

    source: str
    label: str
    arguments: tuple[str, ...]
    runs: tuple[Run, ...] = ()
    sweep: tuple[SweepPoint, ...] = ()
    baseline: Loaded | None = None
    """The same jobs under the baseline that the simulation was compared with."""
    command: str = "simulate"
    """Command of ``cadenza`` that the arguments belong to."""


@dataclass(frozen=True)
class Result:
    """One result of the comparison: all files with one label."""

    label: str
    files: tuple[Loaded, ...]
    runs: tuple[Run, ...]
    """In order of their seeds."""
    index: int
    """Position on the page, which sets color and line style; 0 is the baseline."""

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Return the seeds in order of the runs."""
        return tuple(run.seed for run in self.runs)

    @property
    def sweep(self) -> tuple[SweepPoint, ...]:
        """Return the points of all its sweeps."""
        return tuple(point for file in self.files for point in file.sweep)


class Estimate(NamedTuple):
    """Mean over ``n`` seeds and half its 95 % interval, None for one seed."""

    mean: float
    half: float | None
    n: int


class Cell(NamedTuple):
    """One figure of one result; ``estimate`` is None without one, ``ratio`` is relative to the baseline's mean."""

    estimate: Estimate | None
    ratio: float | None = None
    verdict: Verdict = ""


class PairedSpeedUp(NamedTuple):
    """Baseline JCT over this result's, ascending, for jobs that ended in both; ``unpaired`` counts the other jobs."""

    ratios: tuple[float, ...]
    unpaired: int


class Slice(NamedTuple):
    """Jobs of one kind: its name, and their number, a mean over the runs, and mean JCT in hours in each result."""

    name: str
    jobs: tuple[float, ...]
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Comparison:
    """Contents of the page before it is drawn."""

    results: tuple[Result, ...]
    """The baseline first."""
    cells: Mapping[str, tuple[Cell, ...]]
    """By metric key, in the order of the results."""
    speed_ups: Mapping[str, PairedSpeedUp]
    """By label, without the baseline."""
    by_gpus: tuple[Slice, ...]
    by_model: tuple[Slice, ...]
    by_class: tuple[Slice, ...]
    by_user: tuple[Slice, ...]
    by_size: tuple[Slice, ...]
    """By number of GPUs and length, in classes."""
    notes: tuple[str, ...]
    """Warnings about results that are not fully comparable."""

    @property
    def baseline(self) -> Result:
        """Return the result that all others are compared with."""
        return self.results[0]

    def figure(self, key: str, result: Result) -> Cell | None:
        """Return one figure of one result, or None."""
        cells = self.cells.get(key)
        return cells[result.index] if cells and cells[result.index].estimate else None

    def mean(self, key: str, result: Result) -> float | None:
        """Return one figure's mean over seeds in the unit of the file, or None."""
        cell = self.figure(key, result)
        return cell.estimate.mean if cell and cell.estimate else None
