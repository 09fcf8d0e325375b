"""The command line: finds the command, imports only that one, and turns our errors into exit codes."""

from __future__ import annotations

from importlib.metadata import version

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "top": ("jobs.top", "Show live who holds which GPU, who waits, and why."),
    "why": ("jobs.why", "Tell what was decided about a job, and what it measured."),
    "report": ("report.command", "Compare saved simulation results on one HTML page."),
    "release": ("jobs.release", "Undo what Cadenza holds and suspends in Slurm."),
    "move": ("jobs.move", "Move or resize a running job by checkpoint and requeue."),
    "check-config": ("site.check_config", "Check the configuration files."),
    "show-config": ("site.show_config", "Print the settings in force and where each comes from."),
    "doctor": ("site.doctor", "Check this site: versions, lanes, partitions, keys, agents."),
    "keygen": ("site.keygen", "Make the keys of the link between service and agents."),
    "simulate": ("simulate.command", "Simulate a policy on a trace or a published workload."),
    "policies": ("simulate.policies", "List the policies and their sources."),
    "profile": ("profile.command", "Measure how a job's speed depends on CPUs and memory."),
    "sweep": ("sweep.command", "Search over configurations: early feedback for all, losers stopped."),
    "run": ("jobs.run", "Run a training script unchanged, able to share its GPU."),
    "record": ("site.record", "Record this cluster's answers for tests."),
}

USAGE, LACKING = 2, 3
EXIT_CODES = {
    "ConfigError": USAGE,
    "InputError": USAGE,
    "RequestError": USAGE,
    "SlurmUnavailable": LACKING,
    "EnvironmentLacks": LACKING,
    "StoreError": LACKING,
    "HubError": LACKING,
}
"""By class name, since importing every package's errors would make each command as slow as all; others: 1."""


class Commands(LazyGroup):
    """All commands, whose errors become exit codes."""

    table = COMMANDS

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; one line on standard error and an exit code for the errors that are ours."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.params.get("debug") or not _ours(error):
                raise
            click.echo(f"cadenza: {error}", err=True)
            ctx.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """Return the exit code for an error of our packages.

    >>> exit_code(ValueError("x"))
    1
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((EXIT_CODES[name] for name in names if name in EXIT_CODES), 1)


def _ours(error: Exception) -> bool:
    return any(kind.__module__.startswith("cadenza.") for kind in type(error).__mro__)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 usage or bad input, 3 the environment lacks something (named).",
)
@click.version_option(version("cadenza"), prog_name="cadenza")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:
    """GPU sharing for Slurm."""
    del debug  # read by Commands.invoke
