"""``cadenza top``: the jobs that hold and await each GPU; live, once, or as lines of JSON."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cadenza.slurm_plugin.cli.common import config_option, console, emit, json_option, open_store, store_option
from cadenza.slurm_plugin.cli.jobs.view import Recent, TopView, build

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
@store_option
@config_option
def command(*, once: bool, interval: float, as_json: bool, store: Path | None, config: Path | None) -> None:
    """Show live which job holds which GPU, which jobs wait for it, and why.

    It reads the service's store, which the service's user, its group and root may read; other users get their own jobs
    from the running service. With --json and without --once it prints one line per interval.
    """
    with ExitStack() as stack:
        source = _source(store, config)
        if not isinstance(source, Path):
            stack.enter_context(source)
        views = iter((look(source),)) if once else _views(source, interval)
        if as_json:
            for view in views:
                emit(view)
        else:
            from cadenza.slurm_plugin.cli.jobs.render import screen  # noqa: PLC0415 (slow, and not needed for JSON)
            from cadenza.slurm_plugin.cli.terminal import show  # noqa: PLC0415

            show(console(), map(screen, views), live=not once)


def _source(store: Path | None, config: Path | None) -> StoreReader | Path:
    """Return the store, or the path of the service's socket if this user may not read the store."""
    from cadenza.slurm_plugin.service.errors import StoreError  # noqa: PLC0415
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415

    try:
        return open_store(store, config)
    except StoreError:
        path = Path(load_settings(config).service.socket)
        if store is not None or not path.exists():
            raise
        return path


def look(source: StoreReader | Path) -> TopView:
    """Return the current view of a store, or of the user's own jobs from the service's socket."""
    from cadenza.sidecar.clock import SystemClock  # noqa: PLC0415
    from cadenza.slurm_plugin.service.errors import StoreError  # noqa: PLC0415
    from cadenza.slurm_plugin.service.owner_socket import ask_latest  # noqa: PLC0415

    now_s = SystemClock().now()
    if isinstance(source, Path):
        try:
            latest = ask_latest(source, now_s - SWITCHES_SINCE_S)
        except OSError as error:
            raise StoreError(f"{source}: {error.strerror or error}; is cadenzad up?") from None
        last, effects = latest.round(), latest.effects[:MAX_EFFECTS]
        return build(last, Recent(latest.actions, latest.switches, effects, kill_switch(last)), now_s)
    reader, last = source, source.round()
    switches, effects = reader.switches(since_s=now_s - SWITCHES_SINCE_S), reader.effects(limit=MAX_EFFECTS)
    faults = (*kill_switch(last), *reader.faults())
    return build(last, Recent(reader.actions(limit=MAX_ACTIONS), switches, effects, faults), now_s)


def kill_switch(last: Round | None) -> tuple[str, ...]:
    """Return a sentence if the kill switch of the last round's settings is set, as far as this user can see."""
    from cadenza.slurm_plugin.service.settings import from_record  # noqa: PLC0415

    if last is None or not last.settings:
        return ()
    switch = from_record(last.settings).guard.kill_switch
    return (f"the kill switch is set, no action leaves: rm {switch}",) if os.path.lexists(switch) else ()


def _views(source: StoreReader | Path, interval: float) -> Iterator[TopView]:
    never = threading.Event()
    while True:
        yield look(source)
        never.wait(interval)
