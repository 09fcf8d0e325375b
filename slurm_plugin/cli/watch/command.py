"""``cadenza watch``: idle GPUs, waiting jobs, and what Cadenza would do, with an ordinary user's rights."""

from __future__ import annotations

from pathlib import Path

import click

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.cli.common import console, emit, json_option, say
from cadenza.slurm_plugin.cli.watch.watch_output import screen
from cadenza.slurm_plugin.cli.watch.watching import Watch
from cadenza.slurm_plugin.report.draw import require
from cadenza.slurm_plugin.terminal import show


@click.command("watch")
@click.option("--once", is_flag=True, help="Look once and exit.")
@click.option("--interval", default=60.0, show_default=True, type=click.FloatRange(5.0, 300.0),
              help="Seconds between looks.")  # fmt: skip
@click.option("--partition", metavar="NAME", help="Jobs and nodes of this partition only.")
@click.option("--state", type=click.Path(path_type=Path),
              help="File that sums are kept in (default: ~/.local/state/cadenza/watch-CLUSTER.json).")  # fmt: skip
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE",
              help="Look once, and write the page of cadenza whatif for all runs watched so far.")  # fmt: skip
@json_option
def command(
    *, once: bool, interval: float, partition: str | None, state: Path | None, html: Path | None, as_json: bool
) -> None:
    """Watch this cluster with an ordinary user's rights.

    Shows the GPUs that are idle while jobs wait, and which jobs Cadenza would let make way if all took part. Waits and
    idle GPU hours are added up in a file of yours, also over restarts. Nothing has to be installed on the cluster; it
    only asks squeue and scontrol, and submits, changes and cancels nothing.

    With --json and without --once it prints one line per look.
    """
    # 1. What would fail after the look fails before it.
    if html is not None:
        require()
        if not html.parent.is_dir() or html.is_dir():
            raise InputError(f"--html: {str(html)!r} is not a file in a folder that exists")
    watch, live = Watch(partition, state), not once and html is None
    with watch.locked():
        # 2. Look once, or again and again.
        looks = watch.looks(interval) if live else iter((watch.look(),))
        if as_json:
            for one in looks:
                emit("cadenza.watch/1", one)
        else:
            show(console(), map(screen, looks), live=live)
        # 3. The page.
        if html is not None:
            watch.write_page(html, quiet=as_json)
            say(f"written: {html}", err=as_json)
