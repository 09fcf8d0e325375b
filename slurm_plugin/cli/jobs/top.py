"""``cadenza top``: the jobs that hold and await each GPU; live, once, or as lines of JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import click

from cadenza.slurm_plugin.cli.common import config_option, console, emit, json_option, store_or_socket
from cadenza.slurm_plugin.service.owner_socket import Remote
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.terminal import show
from cadenza.slurm_plugin.views.cluster_view import TopView, look
from cadenza.slurm_plugin.views.top_screen import Screen


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
        if isinstance(source, StoreReader):
            stack.enter_context(source)
        views = iter((look(source),)) if once else _views(look, source, interval)
        if as_json:
            for view in views:
                emit("cadenza.top/1", view)
        else:
            show(console(), map(Screen, views), live=not once)


def _views(
    look: Callable[[StoreReader | Path | Remote], TopView], source: StoreReader | Path | Remote, interval: float
) -> Iterator[TopView]:
    never = threading.Event()
    while True:
        yield look(source)
        never.wait(interval)
