"""``cadenza profile run|pair|show|compare|validate``: measures how a job's speed depends on CPUs and memory."""

from __future__ import annotations

import signal
import sys

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("profile.profile_run", "Measure a command and write its profile."),
    "pair": ("profile.profile_pair", "Measure two commands alone and together, for packing."),
    "show": ("profile.profile_show", "Show profiles as tables."),
    "compare": ("profile.profile_compare", "Compare profiles, model by model."),
    "validate": ("profile.profile_validate", "Check that profiles can be used."),
}


class Profile(LazyGroup):
    """The commands around profiles."""

    table = COMMANDS


def end_on_sigterm() -> None:
    """Let SIGTERM end this command as an exception does, so that what it has started is ended as well."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@click.group("profile", cls=Profile)
def command() -> None:
    """Measure how a job's speed depends on CPUs and memory, and read profiles back."""
