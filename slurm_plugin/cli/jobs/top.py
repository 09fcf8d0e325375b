"""``cadenza top``: the jobs that hold and await each GPU; live, once, or as lines of JSON."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import click

from cadenza.slurm_plugin.cli.common import config_option, console, emit, json_option, open_store, store_option
from cadenza.slurm_plugin.cli.jobs.view import Recent, TopView, build

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from cadenza.slurm_plugin.service.store.reader import StoreReader

SWITCHES_SINCE_S = 60.0
MAX_ACTIONS = 2000
MAX_EFFECTS = 8


@click.command("top")
@click.option("--once", is_flag=True, help="Show one moment and exit.")
@click.option("--interval", default=2.0, show_default=True, type=click.FloatRange(min=0.1),
              help="Seconds between updates.")  # fmt: skip
@json_option
@store_option
@config_option
def command(*, once: bool, interval: float, as_json: bool, store: Path | None, config: Path | None) -> None:
    """Show live which job holds which GPU, which jobs wait for it, and why.

    It reads the service's store, which the service's user, its group and root may read. With --json and without --once
    it prints one line per interval.
    """
    with open_store(store, config) as reader:
        views = iter((look(reader),)) if once else _views(reader, interval)
        if as_json:
            for view in views:
                emit(view)
        else:
            _show(views, live=not once)


def look(reader: StoreReader) -> TopView:
    """Return the current view of a store."""
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415

    now_s = SystemClock().now()
    switches = reader.switches(since_s=now_s - SWITCHES_SINCE_S)
    recent = Recent(reader.actions(limit=MAX_ACTIONS), switches, reader.effects(limit=MAX_EFFECTS))
    return build(reader.round(), recent, now_s)


def _views(reader: StoreReader, interval: float) -> Iterator[TopView]:
    never = threading.Event()
    while True:
        yield look(reader)
        never.wait(interval)


def _show(views: Iterator[TopView], *, live: bool) -> None:
    from rich.live import Live  # noqa: PLC0415

    from cadenza.slurm_plugin.cli.jobs.render import screen  # noqa: PLC0415

    out = console()
    if not live or not out.is_terminal:
        for view in views:
            out.print(screen(view))
        return
    try:
        with Live(console=out, screen=True, auto_refresh=False) as display:
            for view in views:
                display.update(screen(view), refresh=True)
    except KeyboardInterrupt:
        return
