"""``cadenza profile``: sensitivity profiles of jobs."""

from __future__ import annotations

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS = {
    "Commands": {
        "run": ("profile.measure:run", "Measure a command and write its profile."),
        "show": ("profile.show:show", "Check, show and compare profiles."),
    }
}


@click.group("profile", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Measure how a job's speed depends on CPUs and memory, and read profiles."""
