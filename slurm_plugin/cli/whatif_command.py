"""``cadenza whatif``: what a cluster's own jobs would have waited under Cadenza, from Slurm's accounting."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from cadenza.policies.core.errors import EnvironmentLacks, InputError
from cadenza.sidecar.clock import SystemClock, local
from cadenza.slurm_plugin.cli.common import console, emit, json_option, moment, say
from cadenza.slurm_plugin.report.draw import require
from cadenza.slurm_plugin.simulations.array import Submitted
from cadenza.slurm_plugin.simulations.runs import WhatIf, run_whatif
from cadenza.slurm_plugin.simulations.whatif_output import as_csv, as_text, judged, page
from cadenza.slurm_plugin.simulations.whatif_output import as_json as plain

OTHER_WAY = (
    "write two files there: `sacct --allusers --duplicates --json --starttime {} > jobs.json`, `scontrol --all show "
    "node --json > nodes.json`; and give them here: `cadenza whatif --sacct jobs.json --nodes nodes.json`"
)


@click.command("whatif")
@click.option("--sacct", metavar="FILE",
              help="Accounting: sacct --allusers --duplicates --json, or sacct -P.")  # fmt: skip
@click.option("--since", metavar="WHEN", help="Ask this cluster instead: jobs since 28d ago, or since a date.")
@click.option("--nodes", metavar="TEXT|FILE",
              help="The cluster as 16x8:24:500, or a file of scontrol --all show node --json.")  # fmt: skip
@click.option("--site", metavar="FILE", multiple=True,
              help="Rules of its Slurm, a file each: scontrol show config; with --json scontrol --all show partition, "
              "sacctmgr show assoc, sacctmgr show qos, sshare --all.")  # fmt: skip
@click.option("--partition", metavar="NAME", help="Jobs and nodes of this partition only.")
@click.option(
    "--lanes", metavar="N", default="1", help="Lanes per node: jobs that can take turns on a GPU (default: 1)."
)
@click.option("--movable", metavar="PART,…",
              help="Parts of the jobs that keep checkpoints (default: 0.1,0.25,0.5,1; large: 0.1,0.5).")  # fmt: skip
@click.option("--users", metavar="PART,…",
              help="Parts of the users who opt in with all their jobs (default: 0.1,0.5; large: none).")  # fmt: skip
@click.option("--draws", metavar="N", help="Draws of these, for an interval (default: 3; above 5,000 jobs, large: 1).")
@click.option("--sample", metavar="PART", help="A stretch of time with this part of the jobs, such as 0.2.")
@click.option("--more", metavar="lane,memory",
              help="Run again with one more lane, and with twice the memory, to show what they bring.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(path_type=Path), multiple=True, metavar="FILE",
              help="Page to write (default: whatif.html), or its figures (FILE.csv); can be given twice.")  # fmt: skip
@click.option("--array", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
              help="Let Slurm run the simulations as an array, with results in a shared folder.")  # fmt: skip
@click.option("--quiet", is_flag=True, help="No progress bar.")
@json_option
def command(*, output: tuple[Path, ...], as_json: bool, **words: Any) -> None:
    """Show what this cluster's jobs would have waited under Cadenza.

    The verdict comes first: what is gained, from which part of the jobs and users on, what it costs, and who loses.
    Behind it are the jobs as they ran, the same jobs in a simulation of Slurm's own scheduler, and in one of Cadenza as
    it ships. The difference of the first two is the simulation's error; where it is too large there is no verdict.
    Jobs that the accounting cannot tell are left out and counted, by reason. Nothing has to
    be installed on the cluster: two files are enough, and with those of --site the simulated Slurm has the cluster's
    weights, shares, QOS and limits. What is not known is said.

    \b
    sacct --allusers --duplicates --json --starttime now-28days > jobs.json
    scontrol --all show node --json > nodes.json
    cadenza whatif --sacct jobs.json --nodes nodes.json
    """  # noqa: D301 (the escape tells click to keep the lines)
    # 1. Without matplotlib there is no page, and the table says as much as it can.
    lacks, places = "", output or (Path("whatif.html"),)
    try:
        require()
    except EnvironmentLacks as error:
        if any(place.suffix != ".csv" for place in output):
            raise
        lacks = str(error)
    for place in places:
        if not place.parent.is_dir() or place.is_dir():
            raise InputError(f"--output: {str(place)!r} is not a file in a folder that exists")
    # 2. The runs, the verdict, and the files.
    try:
        found = _run(words)
    except Submitted as told:
        say(str(told))
        return
    comparison, judgment = judged(found)
    written = []
    for place in places:
        if place.suffix != ".csv" and lacks:
            continue
        text = as_csv(comparison, judgment) if place.suffix == ".csv" else page(found, comparison, judgment)
        try:
            place.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"--output: {str(place)!r} cannot be written: {error.strerror}") from None
        written.append(str(place))
    # 3. The same in short.
    if as_json:
        emit("cadenza.whatif/1", plain(found, comparison, judgment, next(iter(written), "")))
        return
    console().print(as_text(found, comparison, judgment))
    say(f"written: {', '.join(written)}" if written else f"no page: {lacks}")


def _run(words: Mapping[str, Any]) -> WhatIf:
    """Return the what-if; where a machine has no commands of Slurm's, the error names the way without them."""
    since_s = moment(words["since"], SystemClock().now(), "--since") if words["since"] else None
    try:
        return run_whatif({**words, "since_s": since_s})
    except EnvironmentLacks as error:
        if since_s is None or shutil.which("sacct") is not None:
            raise
        raise EnvironmentLacks(f"{error}, or {OTHER_WAY.format(local(since_s).replace(' ', 'T'))}") from None
