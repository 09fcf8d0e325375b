"""``cadenza sweep best``: the best configuration so far."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import emit, json_option
from cadenza.slurm_plugin.cli.sweep.sweep_show import plain
from cadenza.slurm_plugin.sweep.controller import best_of, load


@click.command("best")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option
def command(*, directory: Path, as_json: bool) -> None:
    """Print the best configuration so far; exit code 1 when none has reported anything."""
    head, book = load(directory)
    best = best_of(book.trials.values(), head.plan)
    if best is None:
        raise click.ClickException("no configuration has reported anything yet")
    if as_json:
        emit(plain(best, head))
    else:
        values = " ".join(f"{name}={value}" for name, value in best.config.items())
        click.echo(f"configuration {best.number} (job {best.job}): {best.best(head.plan.goal):g} with {values}")
