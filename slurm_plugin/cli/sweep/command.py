"""``cadenza sweep run|resume|status|best|stop``: many configurations as one multi-job."""

from __future__ import annotations

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS = {
    "run": ("sweep.sweep_run", "Submit configurations, watch them, stop the losers."),
    "resume": ("sweep.sweep_resume", "Go on with a sweep whose controller has ended."),
    "status": ("sweep.sweep_status", "Show every configuration and what it reported."),
    "best": ("sweep.sweep_best", "Print the best configuration so far."),
    "stop": ("sweep.sweep_stop", "Cancel all jobs of a sweep."),
}


class SweepGroup(LazyGroup):
    """The commands around sweeps."""

    table = COMMANDS


@click.group("sweep", cls=SweepGroup)
def command() -> None:
    """Search over configurations: early feedback for all, losers stopped by a rule, the best favoured."""
