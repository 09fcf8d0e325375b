"""``cadenza simulate``: run a policy on a trace or a published workload, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cadenza.slurm_plugin.cli.common import console, emit

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Jobs and cluster": (
        ("trace", "FILE", "Jobs as CSV: job,submit_s,gpus and model,iterations or duration_s."),
        ("workload", "NAME:KEY=VALUE,…", "A published workload instead of a trace; see below."),
        ("profiles", "FILE", "Profiles of the models as JSON (default: Synergy's published ten)."),
        ("nodes", "TEXT", "NODESxGPUS:CPUS:MEMORY_GB[:TYPE],… such as 4x8:24:500 (default: the workload's own)."),
        ("assign", "I/L/S", "Give jobs without a model one: percent of image, language and speech models."),
        ("opted-in", "PART", "Part of the jobs that opt in, drawn; Slurm alone has the others (default: the trace's)."),
    ),
    "Slurm's queue": (
        ("weights", "NAME=NUMBER,…", "PriorityWeights: age, fairshare, jobsize, partition, qos; or none."),
        ("site", "FILE", "Weights, QOS, accounts, limits and licenses as TOML."),
    ),
    "Policy (default: as the service ships)": (
        ("order", "NAME", "Who goes first; `cadenza policies` lists the names."),
        ("allocate", "NAME", "How CPUs and memory are given out; none: jobs keep what they asked for."),
        ("share", "NAME", "How jobs share a GPU: preemption, timeslice, gandiva or none."),
        ("turns", "fair|order", "Whether jobs that share a GPU have equal parts, or --order holds there too."),
        ("share-between-users", "yes|no", "Whether jobs of different users may share a GPU."),
        ("place", "yes|no", "Whether the policy pins waiting jobs to nodes (default: Slurm chooses)."),
        ("through-slurm", "yes|no", "Whether moves and requests go through Slurm (default: without sharing no)."),
        (
            "baseline",
            "slurm|strict",
            "What to compare with: Slurm's backfill (default), or jobs strictly in order.",
        ),
        ("backfill", "yes|no", "Whether jobs past those that are to run may use what is left (default: yes)."),
    ),
    "Time": (
        ("round", "SECONDS", "Time between rounds (default: 60; without sharing 300)."),
        ("events", "yes|no", "Run a round at each arrival and end too (default: with sharing)."),
        ("preset", "synergy", "Conventions of Synergy's published simulator, so that figures compare."),
        ("window", "FROM:TO", "Completion times of the jobs with these positions only, and end when they are done."),
        ("horizon", "SECONDS", "End here, whatever still runs."),
    ),
    "Costs and faults": (
        ("costs", "FILE", "Seconds that switches take, as TOML (default: those that come with Cadenza)."),
        (
            "lanes",
            "N",
            "Lanes per node: jobs that can take turns on a GPU (default: 1; 2 where they have to).",
        ),
        ("interference", "FILE", "Speeds of packed models as CSV (default: after Gandiva's Table 1)."),
        ("failures", "FILE", "Node failures as CSV: node,start_s,end_s."),
        (
            "checkpoint",
            "SECONDS",
            "Work between checkpoints, which a requeue loses at most (default: 1800).",
        ),
    ),
    "Repeats": (
        ("seed", "N[,N…]", "Seeds of a workload; several give means and 95 % intervals."),
        ("load-sweep", "FROM:TO:STEP", "Run a workload at each load, in jobs an hour."),
    ),
    "Output": (
        ("json", "", "Print JSON."),
        ("more-movable", "", "Run again with a tenth more of the jobs that keep checkpoints, and print the gain."),
        ("per-job", "FILE", "Write one row a job as CSV."),
        ("save", "FILE", "Save the simulation for `cadenza report`."),
        ("label", "TEXT", "Its name there (default: the policy's)."),
        ("quiet", "", "No progress bar."),
    ),
}
"""Heading: options with their metavar (none: a flag) and help."""
VARIABLES = tuple(name.replace("-", "_") for options in GROUPS.values() for name, _, _ in options)
"""The options as ``read_request`` takes them."""
OUTPUTS = ("json", "more_movable", "per_job", "save", "label", "quiet")


class Grouped(click.Command):
    """A command whose help lists the options under headings, and the workloads below."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, then the workloads' keys."""
        named = {parameter.name: parameter for parameter in self.params}
        for heading, options in GROUPS.items():
            records = [named[_variable(name)].get_help_record(ctx) for name, _, _ in options]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record])
        with formatter.section("Workloads"):
            formatter.write_dl(_workloads())


def _variable(option: str) -> str:
    return option.replace("-", "_")


def _workloads() -> list[tuple[str, str]]:
    from cadenza.policies.simulator.workloads.catalogue import KINDS  # noqa: PLC0415

    rows = []
    for name, kind in KINDS.items():
        rows.append((name, f"{kind.line} ({kind.source}); --nodes {kind.cluster}"))
        rows += [(f"  {key.name}={key.default}", key.line) for key in kind.keys]
    return rows


def _options(function: Callable[..., None]) -> click.Command:
    """Give the command every option of ``GROUPS``, all as text, since ``request`` reads and checks them."""
    for _, options in reversed(GROUPS.items()):
        for name, metavar, line in reversed(options):
            if metavar:
                function = click.option(f"--{name}", _variable(name), metavar=metavar, help=line)(function)
            else:
                function = click.option(f"--{name}", _variable(name), is_flag=True, help=line)(function)
    return click.command("simulate", cls=Grouped)(function)


@_options
@click.pass_context
def command(ctx: click.Context, /, **words: Any) -> None:
    """Simulate a policy on a trace or on a published workload.

    The simulator runs the round and the whole decision of the service. Without options of its own a policy is the
    one that the service ships with. --share none alone is Slurm without Cadenza; with --order or --allocate, and with
    --preset synergy, a policy runs as in the published simulators: --allocate cadenza, jobs that wait until they are
    placed, moves that take effect at once. Figures stand next to those of Slurm and of EASY (first come, first served,
    one reservation) on the same jobs. Times are in seconds; completion times are printed in hours.

    \b
    cadenza simulate --trace jobs.csv --nodes 4x8:24:500
    cadenza simulate --trace jobs.csv --nodes 4x8:24:500 --share none --order srtf --allocate tune
    cadenza simulate --workload synergy:load=8,jobs=2000 --seed 1,2,3 --json
    """  # noqa: D301 (the escape tells click to keep the lines)
    from cadenza.slurm_plugin.cli.simulate.output import as_table, write_files  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.simulate.request import read_request  # noqa: PLC0415
    from cadenza.slurm_plugin.cli.simulate.runner import run_request  # noqa: PLC0415

    request = read_request(words, _given(ctx))
    results = run_request(request)
    write_files(results)
    if request.json:
        emit(results.as_json())
    else:
        console().print(as_table(results))


def _given(ctx: click.Context) -> tuple[str, ...]:
    """Return the options that define the simulation, in the order of the help, without those about output."""
    words: list[str] = []
    for options in GROUPS.values():
        for name, _, _ in options:
            variable = _variable(name)
            if variable not in OUTPUTS and ctx.get_parameter_source(variable) is ParameterSource.COMMANDLINE:
                words += [f"--{name}", str(ctx.params[variable])]
    return tuple(words)
