"""``cadenza top``: the jobs that hold and await each GPU; live, once, or as lines of JSON."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cadenza.slurm_plugin.cli.common import config_option, console, emit, json_option, store_or_socket
from cadenza.slurm_plugin.cli.jobs.view import STOPPED, Recent, TopView, build

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cadenza.slurm_plugin.service.store.reader import Round, StoreReader

SWITCHES_SINCE_S = 60.0
MAX_ACTIONS = 2000
MAX_EFFECTS = 8


@click.command("top")
@click.option("--once", is_flag=True, help="Show one moment and exit.")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds between updates.")  # fmt: skip
@json_option
@config_option
def command(*, once: bool, interval: float, as_json: bool, config: Path | None) -> None:
    """Show live which job holds which GPU, which jobs wait for it, and why.

    It reads the service's store, which the service's user, its group and root may read; other users get their own jobs
    from the running service. With --json and without --once it prints one line per interval.
    """
    with ExitStack() as stack:
        source = store_or_socket(config)
        if not isinstance(source, Path):
            stack.enter_context(source)
        views = iter((look(source),)) if once else _views(source, interval)
        if as_json:
            for view in views:
                emit("cadenza.top/1", view)
        else:
            from cadenza.slurm_plugin.cli.jobs.render import Screen  # noqa: PLC0415 (slow, and not needed for JSON)
            from cadenza.slurm_plugin.cli.terminal import show  # noqa: PLC0415

            show(console(), map(Screen, views), live=not once)


def look(source: StoreReader | Path) -> TopView:
    """Return the current view of a store, or of the user's own jobs from the service's socket."""
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415
    from cadenza.slurm_plugin.service.owner_socket import ask_latest  # noqa: PLC0415

    now_s = SystemClock().now()
    if isinstance(source, Path):
        latest = ask_latest(source, now_s - SWITCHES_SINCE_S)
        last, effects = latest.round(), latest.effects[:MAX_EFFECTS]
        rows = (latest.actions, latest.switches, effects, kill_switch(last))
        return build(last, Recent(*rows, latest.hosts, dict(latest.others)), now_s)
    return view_of(source, source.round(), now_s)


def view_of(reader: StoreReader, last: Round | None, now_s: float) -> TopView:
    """Return the view of the last round of a store."""
    switches, effects = reader.switches(since_s=now_s - SWITCHES_SINCE_S), reader.effects(limit=MAX_EFFECTS)
    faults = (*kill_switch(last), *reader.faults())
    return build(last, Recent(reader.actions(limit=MAX_ACTIONS), switches, effects, faults), now_s)


def kill_switch(last: Round | None) -> tuple[str, ...]:
    """Return a sentence if the kill switch of the last round's settings is set, as far as this user can see."""
    from cadenza.slurm_plugin.service.settings import from_record  # noqa: PLC0415

    if last is None or not last.settings:
        return ()
    switch = from_record(last.settings).guard.kill_switch
    return (f"{STOPPED}, no action leaves: rm {switch}",) if os.path.lexists(switch) else ()


def _views(source: StoreReader | Path, interval: float) -> Iterator[TopView]:
    never = threading.Event()
    while True:
        yield look(source)
        never.wait(interval)
