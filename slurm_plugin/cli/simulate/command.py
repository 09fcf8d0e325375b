"""``cadenza simulate``: run a policy on a trace or a published workload, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from cadenza.slurm_plugin.cli.common import console, emit
from cadenza.slurm_plugin.cli.keys import GIVEN, Key, KeyedCommand

if TYPE_CHECKING:
    from collections.abc import Callable

GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "Jobs and cluster": (
        ("trace", "FILE", "Jobs as CSV: job,submit_s,gpus and model,iterations or duration_s."),
        ("workload", "NAME:KEY=VALUE,…", "A published workload instead of a trace; see below."),
        ("profiles", "FILE", "Profiles of the models as JSON (default: Synergy's published ten)."),
        ("nodes", "TEXT", "NODESxGPUS:CPUS:MEMORY_GB[:TYPE],… such as 4x8:24:500 (default: the workload's own)."),
        ("site", "FILE", "Slurm's weights, QOS, accounts, limits and licenses as TOML."),
        ("opted-in", "PART", "Part of the jobs that opt in, drawn; Slurm alone has the others (default: the trace's)."),
        ("seed", "N[,N…]", "Seeds of a workload; several give means and 95 % intervals."),
    ),
    "Policy (default: as the service ships)": (
        ("order", "NAME", "Who goes first; see below."),
        ("allocate", "NAME", "How CPUs and memory are given out; see below."),
        ("share", "NAME", "How jobs share a GPU; see below."),
        ("lanes", "N", "Lanes per node: jobs that can take turns on a GPU (default: 1; 2 where they have to)."),
    ),
    "Output": (
        ("json", "", "Print JSON."),
        ("per-job", "FILE", "Write one row a job as CSV."),
        ("save", "FILE", "Save the simulation for `cadenza report`."),
        ("label", "TEXT", "Its name there (default: the policy's)."),
    ),
}
"""Heading: options with their metavar (none: a flag) and help."""
KEYS = {
    "Keys of --set: the queue and the policy": (
        Key("weights", "NAME=NUMBER,…", "PriorityWeights: age, fairshare, jobsize, partition, qos; or none."),
        Key("baseline", "slurm|strict", "What to compare with: Slurm's backfill (default), or jobs strictly in order."),
        Key("turns", "fair|order", "Whether jobs that share a GPU have equal parts, or --order holds there too."),
        Key("share-between-users", "yes|no", "Whether jobs of different users may share a GPU."),
        Key("place", "yes|no", "Whether the policy pins waiting jobs to nodes; else Slurm chooses."),
        Key("through-slurm", "yes|no", "Whether moves and requests go through Slurm (default: without sharing no)."),
    ),
    "Keys of --set: time, costs and faults": (
        Key("round", "SECONDS", "Time between rounds (default: 60; without sharing 300)."),
        Key("costs", "FILE", "Seconds that switches take, as TOML (default: those that come with Cadenza)."),
        Key("interference", "FILE", "Speeds of packed models as CSV (default: after Gandiva's Table 1)."),
        Key("failures", "FILE", "Node failures as CSV: node,start_s,end_s."),
        Key("checkpoint", "SECONDS", "Work between checkpoints, which a requeue loses at most (default: 1800)."),
    ),
    "Keys of --set: as in the papers": (
        Key("preset", "synergy", "Conventions of Synergy's published simulator, so that figures compare."),
        Key("assign", "I/L/S", "Give jobs without a model one: percent of image, language and speech models."),
        Key("window", "FROM:TO", "Completion times of the jobs with these positions only, and end when they are done."),
        Key("load-sweep", "FROM:TO:STEP", "Run a workload at each load, in jobs an hour."),
    ),
}
OUTPUTS = ("json", "per_job", "save", "label")
POLICIES = {"ordering": "order", "allocation": "allocate", "sharing": "share"}


class Grouped(KeyedCommand):
    """A command whose help lists the options under headings, and names of policies and workloads below."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, the keys, the policies, and the workloads' keys."""
        from cadenza.policies.registry import ENTRIES  # noqa: PLC0415

        named = {parameter.name: parameter for parameter in self.params}
        for heading, options in {**GROUPS, "More": (("set", "", ""),)}.items():
            records = [named[_variable(name)].get_help_record(ctx) for name, _, _ in options]
            with formatter.section(heading):
                formatter.write_dl([record for record in records if record])
        self.format_keys(formatter)
        for kind, option in POLICIES.items():
            with formatter.section(f"Names of --{option}"):
                rows = [(one.name, f"{one.line} ({one.source})") for one in ENTRIES if one.kind == kind]
                formatter.write_dl(rows)
        with formatter.section("Workloads"):
            formatter.write_dl(_workloads())


def _variable(option: str) -> str:
    return "pairs" if option == "set" else option.replace("-", "_")


def _workloads() -> list[tuple[str, str]]:
    from cadenza.policies.simulator.workloads.catalogue import KINDS  # noqa: PLC0415

    rows = []
    for name, kind in KINDS.items():
        rows.append((name, f"{kind.line} ({kind.source}); --nodes {kind.cluster}"))
        rows += [(f"  {key.name}={key.default}", key.line) for key in kind.keys]
    return rows


def _names_of(ctx: click.Context, option: click.Parameter, begun: str) -> list[str]:
    """Return the names of policies that complete an option."""
    from cadenza.policies.registry import ENTRIES  # noqa: PLC0415

    del ctx
    return [one.name for one in ENTRIES if POLICIES[one.kind] == option.name and one.name.startswith(begun)]


def _options(function: Callable[..., None]) -> click.Command:
    """Give the command every option of ``GROUPS``, all as text, since ``request`` reads and checks them."""
    for _, options in reversed(GROUPS.items()):
        for name, metavar, line in reversed(options):
            if metavar:
                complete = _names_of if name in POLICIES.values() else None
                function = click.option(
                    f"--{name}", _variable(name), metavar=metavar, help=line, shell_complete=complete
                )(function)
            else:
                function = click.option(f"--{name}", _variable(name), is_flag=True, help=line)(function)
    return click.command("simulate", cls=Grouped, keys=KEYS)(function)


@_options
@click.pass_context
def command(ctx: click.Context, /, **words: Any) -> None:
    """Simulate a policy on a trace or on a published workload.

    The simulator runs the round and the whole decision of the service. Without options of its own a policy is the
    one that the service ships with. --share none alone is Slurm without Cadenza; with --order or --allocate, and with
    --set preset=synergy, a policy runs as in the published simulators: --allocate cadenza, jobs that wait until they
    are placed, moves that take effect at once. Figures stand next to those of Slurm and of EASY (first come, first
    served, one reservation) on the same jobs. Times are in seconds; completion times are printed in hours.

    \b
    cadenza simulate --trace jobs.csv --nodes 4x8:24:500
    cadenza simulate --trace jobs.csv --nodes 4x8:24:500 --order srtf
    cadenza simulate --workload synergy:load=8,jobs=2000 --seed 1,2,3 --json
    """  # noqa: D301 (the escape tells click to keep the lines)
    from cadenza.slurm_plugin.cli.simulate.output import as_table, write_files  # noqa: PLC0415
    from cadenza.slurm_plugin.simulations.request import read_request  # noqa: PLC0415
    from cadenza.slurm_plugin.simulations.runner import run_request  # noqa: PLC0415

    request = read_request(words, _given(ctx))
    results = run_request(request)
    write_files(results)
    if request.json:
        emit("cadenza.simulate/1", results.as_json())
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
    return (*words, *(word for pair in ctx.meta[GIVEN] for word in ("--set", pair)))
