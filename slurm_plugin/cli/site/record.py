"""``cadenza record``: writes what Slurm answers to a file that tests replay."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("record")
@click.option("--out", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File to append to.")
@click.option("--count", default=1, show_default=True, type=click.IntRange(min=1), help="How many times to read.")
@click.option(
    "--interval",
    default=15.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Seconds between two reads.",
)
def command(*, out: Path, count: int, interval: float) -> None:
    """Record this cluster's jobs and nodes for tests and bug reports.

    The file holds names of users and jobs, and comments: look at it before handing it on.
    """
    from cadenza.slurm_plugin.gateway.pyslurm_gateway import SlurmGateway  # noqa: PLC0415
    from cadenza.slurm_plugin.gateway.recorder import record  # noqa: PLC0415

    with SlurmGateway() as gateway:
        size = record(out, count, interval, gateway)
    click.echo(f"{out}: {count} answers, {size} bytes")
