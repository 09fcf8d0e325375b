"""``cadenza sweep status``: every configuration of a sweep, whether somebody controls it or not."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import console, emit, json_option
from cadenza.slurm_plugin.cli.sweep.sweep_show import plain, summary, table
from cadenza.slurm_plugin.sweep.controller import load


@click.command("status")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option
def command(*, directory: Path, as_json: bool) -> None:
    """Show every configuration of a sweep, the best first, and what it reported.

    Job states are those that the sweep's controller saw last.
    """
    head, book = load(directory)
    if as_json:
        emit({**summary(head, book), "trials": [plain(trial, head) for trial in book.trials.values()]})
    else:
        console().print(table(head, book, rows=len(book.trials)))
