"""``cadenza sweep``: search over configurations as one multi-job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cadenza.slurm_plugin.cli.common import console, emit, json_option, say
from cadenza.slurm_plugin.cli.keys import Key, KeyedCommand
from cadenza.slurm_plugin.cli.lazy import LazyGroup
from cadenza.slurm_plugin.cli.sweep.display import best_so_far, control, plain, summary, table
from cadenza.slurm_plugin.sweep.configs import read_request
from cadenza.slurm_plugin.sweep.controller import Sweep, load
from cadenza.slurm_plugin.sweep.study_plan import plan_of

STOP_KEYS = ("rule", "first", "least", "reduction", "steps")
"""Options that are keys of the table [stop]."""
DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))


COMMANDS = {
    "Commands": {
        "run": ("sweep.command:run", "Submit a job for each configuration, or continue a sweep."),
        "status": ("sweep.command:status", "Show the best configuration, and all of them."),
        "stop": ("sweep.command:stop", "Cancel all jobs of a sweep and wait for their end."),
    }
}
KEYS = {
    "Keys of --set, as in sweep.toml": (
        Key("name", "NAME", "Name of the sweep [the file's]."),
        Key("at-once", "N", "Jobs in Slurm at a time; 0: all [0].", click.INT),
        Key("first", "STEP", "First step at which one may be stopped; asha's first rung [1].", click.INT),
        Key("least", "N", "Least number of configurations to compare one with [4].", click.INT),
        Key("reduction", "N", "asha: the best 1/N of a rung continue [3].", click.FLOAT),
        Key("steps", "STEP", "curve: the last step of a full run.", click.INT),
        Key("top", "N", "Number of best configurations to prefer; 0: none [0].", click.INT),
        Key("finish", "yes|no", "Let the one that reached the target run to its end [yes].", click.BOOL),
        Key("share", "yes|no", "Let the jobs share GPUs [yes].", click.BOOL),
        Key("poll-s", "SECONDS", "Time between reads of the results [1].", click.FLOAT),
        Key("slurm-s", "SECONDS", "Time between reads of Slurm's queue [10].", click.FLOAT),
    )
}


@click.group("sweep", cls=LazyGroup, table=COMMANDS)
def command() -> None:
    """Search over configurations: early feedback from all, weak ones stopped by a rule, the best preferred."""


@click.command("run", cls=KeyedCommand, keys=KEYS)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("words", metavar="-- SBATCH-OPTION… SCRIPT [ARGUMENT…]", nargs=-1, type=click.UNPROCESSED)
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="The sweep's directory [sweeps/NAME].")
@click.option("--goal", type=click.Choice(["max", "min"]), help="Prefer large or small values [max].")
@click.option("--target", type=float, help="Stop all others once a configuration reaches this value.")
@click.option("--rule", help="none, median, asha, curve or MODULE:FUNCTION [asha].")
@json_option
def run(*, file: Path, words: tuple[str, ...], directory: Path | None, as_json: bool, **options: Any) -> None:
    """Submit a job for each configuration of FILE, and stop the weak ones; or continue a sweep.

    FILE is sweep.toml, a .csv with the names in its first line, a .jsonl with one object per line, or alone the
    directory of a sweep whose controller has ended and whose jobs have kept running. Each job is
    `sbatch` with the words after --, in which {lr} becomes the value of lr; if no word has such a placeholder,
    `--lr VALUE` is added for each value. The script reports results by cadenza.sidecar.client.report(value, step).
    Ctrl-C ends this command and no job.
    """
    if file.is_dir():
        if words or directory or any(value is not None for value in options.values()):
            raise click.UsageError("a sweep continues as it was submitted: give its directory alone")
        with Sweep(file) as sweep:
            control(sweep, as_json=as_json)
        return
    request = read_request(file)
    given = {key: value for key, value in options.items() if value is not None}
    stop = {key: given.pop(key) for key in STOP_KEYS if key in given}
    plan = plan_of({**request.plan, **given}, stop, str(file))
    place = directory or Path("sweeps") / plan.name
    with Sweep.create(place, plan, words, request.configs, study=request.study) as sweep:
        control(sweep, as_json=as_json)


@click.command("status")
@DIRECTORY
@json_option
def status(*, directory: Path, as_json: bool) -> None:
    """Show the best configuration so far, and every one with its results, the best first.

    Job states are the last ones that the sweep's controller read from Slurm.
    """
    head, state = load(directory)
    if as_json:
        trials = [plain(trial, head) for trial in state.trials.values()]
        emit("cadenza.sweep/1", {**summary(head, state), "trials": trials})
    else:
        console().print(table(head, state, rows=len(state.trials)))
        say(best_so_far(head, state))


@click.command("stop")
@DIRECTORY
def stop(*, directory: Path) -> None:
    """Cancel all jobs of a sweep and wait for their end.

    End its controller first (Ctrl-C), because only one process at a time may control a sweep.
    """
    with Sweep(directory) as sweep:
        sweep.stop()
        ended = sum(1 for _ in sweep.finished())
        say(f"{sweep.head.id}: {ended} jobs ended" if ended else f"{sweep.head.id}: no job was left")
