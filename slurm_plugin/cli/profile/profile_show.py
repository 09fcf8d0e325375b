"""``cadenza profile show``: profiles as tables, and what a measurement found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cadenza.slurm_plugin.cli.common import console, emit, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from cadenza.policies.core.profile import Profile
    from cadenza.profiler.measure.finished_points import State
    from cadenza.profiler.profile_builder import Finding

FILES = click.argument("files", metavar="FILE…", nargs=-1, required=True, type=click.Path(path_type=Path))


def loaded(path: Path) -> dict[str, Profile]:
    """Return a file's profiles; raise InputError naming file and key."""
    from cadenza.policies.core.errors import InputError  # noqa: PLC0415
    from cadenza.policies.inputs.csv_table import decode  # noqa: PLC0415
    from cadenza.policies.inputs.profiles import read_profiles  # noqa: PLC0415

    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    return read_profiles(decode(data, str(path)), str(path))


@click.command("show")
@FILES
@json_option
def command(*, files: tuple[Path, ...], as_json: bool) -> None:
    """Show profiles: throughput over CPUs and memory for each GPU, relative to the proportional share."""
    found = [(path, profile) for path in files for profile in loaded(path).values()]
    if as_json:
        emit([{"file": str(path), **plain(profile)} for path, profile in found])
        return
    for _, profile in found:
        console().print(table(profile))


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


def table(profile: Profile) -> Table:
    """Return a profile's throughput, a row for each number of CPUs."""
    from rich.table import Table  # noqa: PLC0415

    share = profile.reference
    title = f"{profile.model}{f' on {profile.gpu}' if profile.gpu else ''}: {profile.iteration_s * 1000:.4g} ms a step"
    caption = (
        f"1 = {share.cpus / share.gpus:g} CPUs and {share.memory_gb / share.gpus:.4g} GB for each GPU; "
        f"best {profile.best_speed:.2f}x with {profile.best.cpus:g} CPUs and {profile.best.memory_gb:.4g} GB"
    )
    found = Table(title=title, title_justify="left", box=None, header_style="bold", caption=caption)
    found.caption_justify = "left"
    found.add_column("CPUs", justify="right")
    for memory in profile.memory_gb_per_gpu:
        found.add_column(f"{memory:.4g} GB", justify="right")
    for cpus, row in zip(profile.cpus_per_gpu, profile.throughput, strict=True):
        found.add_row(f"{cpus:g}", *(f"{value:.2f}" for value in row))
    return found


def finding_table(finding: Finding, state: State) -> Table:
    """Return what was measured beside what the law says, a row for each number of CPUs."""
    from rich.table import Table  # noqa: PLC0415

    found = Table(title=finding.profile.model, title_justify="left", box=None, header_style="bold")
    for name in ("CPUs/GPU", "ms a step", "±", "law ms", "speed", "CPU-ms", "waits"):
        found.add_column(name, justify="right")
    points = {point.cpus / finding.subject.gpus: point for point in state.measured()}
    unit = finding.time_s(finding.subject.share)
    for cpus in finding.profile.cpus_per_gpu:
        seconds = finding.time_s(cpus)
        point = points.get(cpus)
        measured = ("predicted", "", "") if point is None else (
            f"{point.half_s / point.iteration_s:.1%}", f"{point.cpu_s * 1000:.1f}", f"{point.waited:.0%}"
        )  # fmt: skip
        law = f"{finding.law.time_s(cpus) * 1000:.1f}"
        found.add_row(f"{cpus:g}", f"{seconds * 1000:.1f}", measured[0], law, f"{unit / seconds:.2f}x", *measured[1:])
    return found


def report(finding: Finding, state: State, out: str) -> dict[str, Any]:
    """Return a measurement for JSON."""
    from cadenza.profiler.profile_builder import best_cpus, best_memory_gb, gain, sbatch, words  # noqa: PLC0415

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
