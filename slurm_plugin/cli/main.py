"""The command line: imports the called command only, and turns the errors of our packages into exit codes."""

from __future__ import annotations

from importlib.metadata import version

import click

from cadenza.slurm_plugin.cli.lazy import LazyGroup

COMMANDS: dict[str, dict[str, tuple[str, str]]] = {
    "Users": {
        "top": ("jobs.top:command", "Show which job holds which GPU, which jobs wait, and why."),
        "why": ("jobs.why:command", "Explain the decisions about a job and show their effects."),
        "run": ("jobs.run:command", "Run a training script unchanged, able to share its GPU."),
        "profile": ("profile:command", "Measure how a job's speed depends on CPUs and memory."),
        "sweep": ("sweep.command:command", "Search over configurations and stop the weak ones early."),
    },
    "Evaluate": {
        "whatif": ("whatif_command:command", "Show what this cluster's jobs would have waited under Cadenza."),
        "watch": ("watch.command:command", "Show idle GPUs and what sharing would do, with a user's rights."),
        "simulate": ("simulate.command:command", "Simulate a policy on a trace or a published workload."),
        "report": ("report_command:command", "Compare saved simulations, or sum up what sharing saved."),
    },
    "Operate": {
        "doctor": ("site.command:doctor", "Check this site: versions, lanes, partitions, keys, agents."),
        "web": ("web_command:command", "Show the cluster, jobs and reports as web pages."),
        "backup": ("backup_command:command", "Save settings, keys and what is to undo in a file, or restore it."),
        "host": ("host_command:command", "Empty hosts for maintenance or a reboot, and give them back."),
        "move": ("jobs.control:move", "Move or resize a running job by checkpoint and requeue."),
        "release": ("jobs.control:release", "Undo what Cadenza has changed about jobs in Slurm."),
        "config": ("site.config_command:command", "Check the settings, and print those in force."),
    },
    "Install": {
        "plan": ("site.plan_command:command", "Print what this site's files need, or what is left to remove."),
        "keygen": ("site.keygen:keygen", "Create or rotate the keys of the service and of the hosts."),
    },
}
"""The commands by their readers: with those below profile and sweep 21 at most, with 104 options."""


class Commands(LazyGroup):
    """All commands; their errors become exit codes."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; for an error of our packages or of a file print one line and exit with its code."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            ours = any(kind.__module__.startswith("cadenza.") for kind in type(error).__mro__)
            of_file = isinstance(error, OSError) and error.filename is not None
            if ctx.params.get("debug") or not (ours or of_file):
                raise
            from cadenza.slurm_plugin.cli.common import say  # noqa: PLC0415 (slow)

            text = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and of_file else str(error)
            lines = getattr(error, "faults", (text,))
            say(*(line if line.startswith("  ") else f"cadenza: {line}" for line in lines), err=True)
            ctx.exit(3 if of_file else getattr(error, "exit_code", 1))


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
