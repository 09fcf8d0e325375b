"""``cadenza profile compare``: the same model in several profiles, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cadenza.slurm_plugin.cli.common import console, emit, json_option
from cadenza.slurm_plugin.cli.profile.profile_show import FILES, loaded

if TYPE_CHECKING:
    from cadenza.policies.core.profile import Profile


class Row(msgspec.Struct, frozen=True):
    """One model in one file; ``times`` are seconds a step by CPUs for each GPU, with the most memory."""

    model: str
    file: str
    gpu: str
    iteration_s: float
    best_cpus: float
    best_memory_gb: float
    best_speed: float
    times: dict[str, float]
    relative: float
    """Speed at the best demand over that of the model's first file, both in steps a second."""


@click.command("compare")
@FILES
@json_option
def command(*, files: tuple[Path, ...], as_json: bool) -> None:
    """Compare profiles: what each model reaches in each file, and how much faster than in the first file."""
    found = rows([(str(path), profile) for path in files for profile in loaded(path).values()])
    if as_json:
        emit(found)
        return
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("MODEL", "FILE", "GPU", "ms a step at the share", "best with", "then", "against the first"):
        table.add_column(name)
    for row in found:
        demand = f"{row.best_cpus:g} CPUs, {row.best_memory_gb:.4g} GB"
        cells = (f"{row.iteration_s * 1000:.4g}", demand, f"{row.best_speed:.2f}x", f"{row.relative:.2f}x")
        table.add_row(row.model, row.file, row.gpu or "any", *cells)
    console().print(table)


def rows(found: list[tuple[str, Profile]]) -> list[Row]:
    """Return the models in order of their first appearance, each file's row below it."""
    order = list(dict.fromkeys(profile.model for _, profile in found))
    made = []
    for model in order:
        mine = [(file, profile) for file, profile in found if profile.model == model]
        first = mine[0][1]
        made += [_row(file, profile, first) for file, profile in mine]
    return made


def _row(file: str, profile: Profile, first: Profile) -> Row:
    steps_s = profile.best_speed / profile.iteration_s
    return Row(
        model=profile.model,
        file=file,
        gpu=profile.gpu,
        iteration_s=profile.iteration_s,
        best_cpus=profile.best.cpus,
        best_memory_gb=profile.best.memory_gb,
        best_speed=profile.best_speed,
        times={
            f"{cpus:g}": profile.iteration_s / row[-1]
            for cpus, row in zip(profile.cpus_per_gpu, profile.throughput, strict=True)
        },
        relative=steps_s / (first.best_speed / first.iteration_s),
    )
