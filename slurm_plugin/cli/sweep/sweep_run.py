"""``cadenza sweep run``: makes a sweep of a file of configurations, and controls it until it is over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from cadenza.slurm_plugin.cli.common import json_option
from cadenza.slurm_plugin.cli.sweep.sweep_control import control
from cadenza.slurm_plugin.sweep.configs import read_request
from cadenza.slurm_plugin.sweep.controller import Sweep
from cadenza.slurm_plugin.sweep.errors import InputError
from cadenza.slurm_plugin.sweep.study_plan import Plan

STOP = ("rule", "first", "least", "reduction", "steps")
"""Options that are keys of [stop]."""


@click.command("run")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("words", metavar="-- SBATCH-OPTION… SCRIPT [ARGUMENT…]", nargs=-1, type=click.UNPROCESSED)
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="The sweep's directory [sweeps/NAME].")
@click.option("--name", help="Name of the sweep [the file's].")
@click.option("--goal", type=click.Choice(["max", "min"]), help="Whether more or less is better [max].")
@click.option("--target", type=float, help="Stop all others once a value is as good.")
@click.option("--finish/--no-finish", default=None, help="Whether the one that reached it runs to its end [finish].")
@click.option("--rule", help="none, median, asha, curve or MODULE:FUNCTION [asha].")
@click.option("--first", type=int, help="Step before which nobody is stopped; asha's first rung [1].")
@click.option("--least", type=int, help="Least number of configurations to compare one with [4].")
@click.option("--reduction", type=float, help="Asha: the best 1/N of a rung go on [3].")
@click.option("--steps", type=int, help="Curve: the last step of a whole run.")
@click.option("--top", type=int, help="Favour so many of the best; 0: none [0].")
@click.option("--at-once", type=int, help="Jobs in Slurm at a time; 0: all [0].")
@click.option("--share/--no-share", default=None, help="Whether the jobs share GPUs [share].")
@click.option("--poll-s", type=float, help="Seconds between two looks at results [1].")
@click.option("--slurm-s", type=float, help="Seconds between two looks at Slurm's queue [10].")
@json_option
def command(*, file: Path, words: tuple[str, ...], directory: Path | None, as_json: bool, **options: Any) -> None:
    """Submit a job for each configuration of FILE, and stop those that lose.

    FILE is sweep.toml, a .csv with the names in its first line, or a .jsonl with an object a line. Each job is
    `sbatch` with the words after --, in which {lr} becomes the value of lr; where no word has such a placeholder,
    `--lr VALUE` is added for each value. The script tells results by cadenza.sidecar.client.report(value, step).
    Ctrl-C ends this command and no job: `cadenza sweep resume` goes on.
    """
    request = read_request(file)
    plan = plan_of(request.plan, options, str(file))
    where = directory or Path("sweeps") / plan.name
    with Sweep.create(where, plan, words, request.configs, study=request.study) as sweep:
        control(sweep, as_json=as_json)


def plan_of(known: dict[str, Any], options: dict[str, Any], source: str) -> Plan:
    """Return the plan of a file with the command line's word laid over it; raise InputError with the key."""
    given = {key: value for key, value in options.items() if value is not None}
    stop = {key: given.pop(key) for key in STOP if key in given}
    values = msgspec.to_builtins({**known, **given})
    values["stop"] = {**values.get("stop", {}), **stop}
    try:
        return msgspec.convert(values, Plan)
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        raise InputError(f"{source}: {key.rstrip('`')}: {what[:1].lower()}{what[1:]}") from None
