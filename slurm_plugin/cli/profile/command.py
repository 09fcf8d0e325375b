"""``cadenza profile``: the group of the commands that measure and read profiles."""

from __future__ import annotations

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("profile.measure:run", "Measure a command and write its profile."),
    "pair": ("profile.measure:pair", "Measure two commands alone and together, for packing."),
    "show": ("profile.show:show", "Show profiles as tables."),
    "compare": ("profile.show:compare", "Compare profiles, model by model."),
    "validate": ("profile.show:validate", "Check that profiles can be used."),
}


@click.group("profile", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Measure how a job's speed depends on CPUs and memory, and read profiles."""
