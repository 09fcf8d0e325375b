"""``cadenza profile show``: profiles and measurements, checked, as tables and JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.profile import Profile
from cadenza.policies.inputs.csv_table import decode
from cadenza.policies.inputs.profiles import read_profiles
from cadenza.profiler.measure.finished_points import State
from cadenza.profiler.profile_builder import Finding, best_cpus, best_memory_gb, gain, sbatch, words
from cadenza.profiler.validation import require_usable
from cadenza.slurm_plugin.cli.common import console, emit, json_option, say

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


def loaded(path: Path) -> dict[str, Profile]:
    """Return the profiles of a file by model; raise InputError with file and key."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return read_profiles(decode(data, str(path)), str(path))


# --- show --------------------------------------------------------------------------------------------------


@click.command("show")
@click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--gpu", default="", metavar="TYPE", help="GPU type that the profiles must cover.")
@json_option
def show(*, files: tuple[Path, ...], gpu: str, as_json: bool) -> None:
    """Check profiles, and show throughput over CPUs and memory for each GPU, relative to the proportional share.

    A profile must follow its schema, its throughput must never fall with more resources, and with --gpu it must cover
    this type. The exit code is 2 if one cannot be used; the error names the file and the key. A model of several files
    is compared: its best speed in each, and the ratio to the first.
    """
    profiles: list[tuple[str, Profile]] = []
    errors: list[str] = []
    for path in files:
        try:
            profiles += [(str(path), profile) for profile in _usable(path, gpu)]
        except InputError as error:
            errors.append(str(error))
    comparison = rows(profiles)
    if as_json:
        emit("cadenza.profiles/1", {
            "profiles": [{"file": file, **plain(profile)} for file, profile in profiles],
            "comparison": comparison,
            "errors": errors,
        })  # fmt: skip
    else:
        for _, profile in profiles:
            console().print(table(profile))
        if len(comparison) > len({row.model for row in comparison}):
            console().print(compared(comparison))
        say(*(f"cadenza: {error}" for error in errors), err=True)
    if errors:
        raise click.exceptions.Exit(2)


def _usable(path: Path, gpu: str) -> list[Profile]:
    """Return a file's profiles; raise InputError for one that cannot be used."""
    found = list(loaded(path).values())
    for profile in found:
        require_usable(profile, str(path), gpu)
        for sibling in profile.siblings.values():
            require_usable(sibling, str(path))
    return found


def plain(profile: Profile) -> dict[str, Any]:
    """Return a profile's values for JSON."""
    return {
        "model": profile.model,
        "gpu": profile.gpu,
        "iteration_s": profile.iteration_s,
        "reference": profile.reference._asdict(),
        "best": profile.best._asdict(),
        "best_speed": profile.best_speed,
        "cpus_per_gpu": profile.cpus_per_gpu,
        "memory_gb_per_gpu": profile.memory_gb_per_gpu,
        "throughput": profile.throughput,
        "gpu_memory_gb": {"peak": profile.gpu_memory_peak_gb, "low": profile.gpu_memory_low_gb},
        "gpu_utilization": profile.gpu_utilization,
    }


def table(profile: Profile) -> Group:
    """Return a profile's throughput, one row per number of CPUs and one column per GB, and what 1 stands for."""
    from rich.console import Group  # noqa: PLC0415 (slow, and not needed for JSON)
    from rich.table import Table  # noqa: PLC0415

    share, model = profile.reference, f"{profile.model}{f' on {profile.gpu}' if profile.gpu else ''}"
    found = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("CPUs", *(f"{memory:.4g}" for memory in profile.memory_gb_per_gpu)):
        found.add_column(name, justify="right", no_wrap=True)
    for cpus, row in zip(profile.cpus_per_gpu, profile.throughput, strict=True):
        found.add_row(f"{cpus:g}", *(f"{value:.2f}" for value in row))
    return Group(
        f"{model}: {profile.iteration_s * 1000:.4g} ms a step; throughput by CPUs and GB for each GPU",
        found,
        f"1 = {share.cpus / share.gpus:g} CPUs and {share.memory_gb / share.gpus:.4g} GB for each GPU; "
        f"best {profile.best_speed:.2f}x with {profile.best.cpus:g} CPUs and {profile.best.memory_gb:.4g} GB",
    )


def finding_table(finding: Finding, state: State) -> Table:
    """Return measured times and the times of the fitted law, one row per number of CPUs."""
    from rich.table import Table  # noqa: PLC0415

    result = Table(title=finding.profile.model, title_justify="left", box=None, header_style="bold")
    for name in ("CPUs/GPU", "ms a step", "±", "law ms", "speed", "CPU-ms", "waits"):
        result.add_column(name, justify="right", no_wrap=True)
    points = {point.cpus / finding.subject.gpus: point for point in state.measured()}
    unit = finding.time_s(finding.subject.share)
    for cpus in finding.profile.cpus_per_gpu:
        seconds = finding.time_s(cpus)
        point = points.get(cpus)
        measured = ("predicted", "", "") if point is None else (
            f"{point.half_s / point.iteration_s:.1%}", f"{point.cpu_s * 1000:.1f}", f"{point.waited:.0%}"
        )  # fmt: skip
        law = f"{finding.law.time_s(cpus) * 1000:.1f}"
        result.add_row(f"{cpus:g}", f"{seconds * 1000:.1f}", measured[0], law, f"{unit / seconds:.2f}x", *measured[1:])
    return result


def report(finding: Finding, state: State, out: str) -> dict[str, Any]:
    """Return a measurement for JSON."""
    return {
        "written": out,
        "profile": plain(finding.profile),
        "law": {**finding.law._asdict(), "error": finding.error},
        "points": state.measured(),
        "spent_s": state.spent_s,
        "launches": state.launches,
        "cache_gb": {
            gb: {"measured_s": seconds, "computed_s": finding.cached_s(float(gb))}
            for gb, seconds in state.memory.items()
        },
        "best": {"cpus": best_cpus(finding), "memory_gb": best_memory_gb(finding), "gain": gain(finding)},
        "sbatch": sbatch(finding),
        "words": words(finding),
        "notes": finding.notes,
    }


# --- compare -----------------------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One model in one file; ``times``: seconds per step by CPUs per GPU, with the largest memory."""

    model: str
    file: str
    gpu: str
    iteration_s: float
    best_cpus: float
    best_memory_gb: float
    best_speed: float
    times: dict[str, float]
    relative: float
    """Steps per second at the best demand, relative to the model's first file."""


def compared(comparison: list[Row]) -> Table:
    """Return one row for each model and file."""
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("MODEL", "FILE", "GPU", "ms a step", "best with", "speed", "to the first"):
        table.add_column(name, overflow="fold", no_wrap=name not in {"MODEL", "FILE"})
    for row in comparison:
        demand = f"{row.best_cpus:g} CPUs, {row.best_memory_gb:.4g} GB"
        cells = (f"{row.iteration_s * 1000:.4g}", demand, f"{row.best_speed:.2f}x", f"{row.relative:.2f}x")
        table.add_row(row.model, row.file, row.gpu or "any", *cells)
    return table


def rows(profiles: list[tuple[str, Profile]]) -> list[Row]:
    """Return a row for each model and file, models in the order of their first appearance."""
    order = list(dict.fromkeys(profile.model for _, profile in profiles))
    result = []
    for model in order:
        mine = [(file, profile) for file, profile in profiles if profile.model == model]
        first_steps_s = mine[0][1].best_speed / mine[0][1].iteration_s
        for file, profile in mine:
            speeds = zip(profile.cpus_per_gpu, profile.throughput, strict=True)
            times = {f"{cpus:g}": profile.iteration_s / row[-1] for cpus, row in speeds}
            relative = profile.best_speed / profile.iteration_s / first_steps_s
            best = (profile.best.cpus, profile.best.memory_gb, profile.best_speed)
            result.append(Row(model, file, profile.gpu, profile.iteration_s, *best, times, relative))
    return result
