"""``cadenza sweep stop``: cancels all jobs of a sweep."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.sweep.controller import Sweep


@click.command("stop")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def command(*, directory: Path) -> None:
    """Cancel all jobs of a sweep, and wait until they have ended.

    End its controller first (Ctrl-C): one process at a time may act on a sweep.
    """
    with Sweep(directory) as sweep:
        sweep.stop()
        ended = sum(1 for _ in sweep.finished())
        click.echo(f"{sweep.head.id}: {ended} jobs ended" if ended else f"{sweep.head.id}: no job was left")
