"""``cadenza sweep resume``: controls a sweep again from what its directory says."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import json_option
from cadenza.slurm_plugin.cli.sweep.sweep_control import control
from cadenza.slurm_plugin.sweep.controller import Sweep


@click.command("resume")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@json_option
def command(*, directory: Path, as_json: bool) -> None:
    """Go on with a sweep whose controller has ended or was killed; its jobs ran on meanwhile."""
    with Sweep(directory) as sweep:
        control(sweep, as_json=as_json)
