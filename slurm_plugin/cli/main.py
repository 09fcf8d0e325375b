"""The command line: imports the called command only, and turns the errors of our packages into exit codes."""

from __future__ import annotations

from importlib.metadata import version

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS: dict[str, tuple[str, str]] = {
    "top": ("jobs.top:command", "Show live which job holds which GPU, which jobs wait, and why."),
    "why": ("jobs.why:command", "Explain the decisions about a job and show their effects."),
    "report": ("report.command:command", "Compare saved simulations, or summarize what sharing saved."),
    "release": ("jobs.control:release", "Undo Cadenza's holds and suspends in Slurm."),
    "lanes": ("site.lanes_command:lanes", "Open, close and list lanes that are not in slurm.conf."),
    "move": ("jobs.control:move", "Move or resize a running job by checkpoint and requeue."),
    "check-config": ("site.config_commands:check", "Check the configuration files."),
    "show-config": ("site.config_commands:show", "Print every setting in force and the file it comes from."),
    "doctor": ("site.command:doctor", "Check this site: versions, lanes, partitions, keys, agents."),
    "setup": ("site.setup_command:setup", "Print the lines that give this site's hosts lanes, and check them."),
    "uninstall": ("site.leftovers:uninstall", "List what is left of Cadenza on this machine and in Slurm."),
    "keygen": ("site.keygen:keygen", "Create or rotate the keys of the connection between service and agents."),
    "simulate": ("simulate.command:command", "Simulate a policy on a trace or a published workload."),
    "whatif": ("whatif.command:command", "Show what this cluster's own jobs would have waited under Cadenza."),
    "watch": ("watch.command:command", "Show idle GPUs and what sharing would do, with a user's rights."),
    "policies": ("simulate.policies:command", "List the policies and their sources."),
    "profile": ("profile.measure:command", "Measure how a job's speed depends on CPUs and memory."),
    "sweep": ("sweep.command:command", "Search over configurations and stop the weak ones early."),
    "run": ("jobs.control:run", "Run a training script unchanged, able to share its GPU."),
    "record": ("site.command:record", "Record this cluster's answers for tests and bug reports."),
}

USAGE, ENVIRONMENT = 2, 3
EXIT_CODES = {
    "ConfigError": USAGE,
    "InputError": USAGE,
    "RequestError": USAGE,
    "SlurmUnavailable": ENVIRONMENT,
    "EnvironmentLacks": ENVIRONMENT,
    "StoreError": ENVIRONMENT,
    "HubError": ENVIRONMENT,
}
"""Exit codes by class name, because importing the errors of every package would slow down each command; others: 1."""


class Commands(LazyGroup):
    """All commands; their errors become exit codes."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; for an error of our packages print one line and exit with its code."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            ours = any(kind.__module__.startswith("cadenza.") for kind in type(error).__mro__)
            if ctx.params.get("debug") or not ours:
                raise
            from cadenza.slurm_plugin.cli.common import say  # noqa: PLC0415 (slow)

            say(f"cadenza: {error}", err=True)
            ctx.exit(exit_code(error))


def exit_code(error: Exception) -> int:
    """Return the exit code for an error of our packages.

    >>> exit_code(ValueError("x"))
    1
    """
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((EXIT_CODES[name] for name in names if name in EXIT_CODES), 1)


@click.group(
    cls=Commands,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 the environment lacks something, which is named.",
)
@click.version_option(version("cadenza"), prog_name="cadenza")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(*, debug: bool) -> None:
    """Share GPUs between Slurm jobs."""
    del debug  # read by Commands.invoke
