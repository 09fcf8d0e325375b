"""``cadenza check-config``: the configuration files, key by key, and whether the values go together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cadenza.sidecar.config import DEFAULT_PATH
from cadenza.slurm_plugin.cli.common import emit, json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cadenza.slurm_plugin.service.settings import Settings


@click.command("check-config")
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_option
def command(*, file: Path | None, as_json: bool) -> None:
    """Check FILE (default: /etc/cadenza/cadenza.toml) with the conf.d beside it.

    An error ends with exit code 2 and names file and key; advice does not.
    """
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415

    settings = load_settings(file or DEFAULT_PATH)
    found = [*advice(settings), *policy_advice(settings)]
    if as_json:
        emit({"file": str(file or DEFAULT_PATH), "ok": True, "advice": found})
        return
    click.echo(f"{file or DEFAULT_PATH}: OK, mode {settings.service.mode}")
    for line in found:
        click.echo(f"  note: {line}")


def policy_advice(settings: Settings) -> Iterator[str]:
    """Yield what is wrong with profiles, and choices that have no effect."""
    from cadenza.slurm_plugin.service.live_policy import allocates, sizes_pending  # noqa: PLC0415
    from cadenza.slurm_plugin.service.profiles.library import Shelf  # noqa: PLC0415

    table, folder = settings.policy, settings.profiles.directory
    shelf = Shelf(Path(folder) if folder else None)
    shelf.refresh()
    yield from (f"profile not used: {problem}" for problem in shelf.library.problems)
    usable = sum(entry.profile is not None for entry in shelf.library.entries)
    if sizes_pending(settings) and not usable:
        yield f"[policy] allocate = {table.allocate!r} and [profiles] directory {folder!r} holds no profile"
    if usable and not allocates(settings):
        yield '[policy] allocate = "none": profiles are shown and change nothing'
    if table.order != "fifo" and settings.service.admission == "native":
        yield f"[policy] order = {table.order!r} orders placement in held admission only: Slurm starts the jobs"
    if settings.gandiva != type(settings.gandiva)() and table.share != "gandiva":
        yield f"[gandiva] has no effect with [policy] share = {table.share!r}"


def advice(settings: Settings) -> Iterator[str]:
    """Yield what is valid and yet probably not meant."""
    if not settings.guard.partitions:
        yield "[guard] partitions is empty: no partition is managed, so nothing will ever be done"
    if not settings.agent.service:
        yield "[agent] service is empty: agents take turns locally and the service does not see them"
    if settings.guard.min_run_s > settings.sharing.slice_s:
        yield "[guard] min_run_s exceeds [sharing] slice_s: turns last min_run_s"
    if settings.guard.cool_down_s > settings.sharing.slice_s:
        yield "[guard] cool_down_s exceeds [sharing] slice_s: yields are put off by it"
    if settings.service.poll_s > settings.sharing.slice_s:
        yield "[service] poll_s exceeds [sharing] slice_s: turns last poll_s"
    if settings.service.admission == "held" and not settings.applies:
        yield '[service] admission = "held" has no effect while mode = "observe"'
    if Path(settings.guard.kill_switch).exists():
        yield f"the kill switch {settings.guard.kill_switch} exists: no action leaves"
