"""``cadenza lanes``: further lanes on demand, opened, closed and listed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from cadenza.sidecar.bounds import MAX_LANES
from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, say

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cadenza.policies.core.model import ClusterSnapshot
    from cadenza.slurm_plugin.service.settings import Settings


class LaneRow(msgspec.Struct, frozen=True):
    """One further lane: its node in Slurm, and why it takes no jobs, empty if it does."""

    host: str
    node: str
    on_demand: bool
    wanted: bool
    state: str
    """open | drained | down | absent"""
    reason: str = ""


@click.group("lanes")
def lanes() -> None:
    """Open, close and list further lanes of hosts."""


@lanes.command("add")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@click.option("--count", default=1, show_default=True, type=click.IntRange(1, MAX_LANES), help="Lanes above lane 0.")
@config_option
def add(*, hosts: tuple[str, ...], count: int, config: Path | None) -> None:
    """Let the service open further lanes on each HOST, while its mode is "apply".

    Its agent starts a slurmd for each, which registers the lane in Slurm. They close when the mode is "observe".
    """
    _ask(hosts, count, config)


@lanes.command("remove")
@click.argument("hosts", nargs=-1, required=True, metavar="HOST...")
@config_option
def remove(*, hosts: tuple[str, ...], config: Path | None) -> None:
    """Let the service close the lanes of each HOST that are not in slurm.conf.

    Each lane is drained at once, and leaves Slurm when the last job on it has ended.
    """
    _ask(hosts, 0, config)


@lanes.command("list")
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@json_option
@config_option
def show(*, hosts: tuple[str, ...], as_json: bool, config: Path | None) -> None:
    """List the further lanes of all hosts, or of each HOST, as the last round saw them."""
    snapshot, _ = _last(config)
    rows = [row for row in rows_of(snapshot) if not hosts or row.host in hosts]
    if as_json:
        emit(rows)
        return
    for row in rows:
        kind = "on demand" if row.on_demand else "in slurm.conf"
        say(f"{row.node}: {row.state}, {kind}" + (f": {row.reason}" if row.reason else ""))
    if not rows:
        say("no host has a further lane")


def rows_of(snapshot: ClusterSnapshot) -> Iterator[LaneRow]:
    """Yield all further lanes, in Slurm or wanted, by host."""
    from cadenza.slurm_plugin.service.lanes_on_demand import missing_reasons  # noqa: PLC0415

    nodes = sorted((node for node in snapshot.nodes), key=lambda node: node.name)
    for host in sorted(snapshot.hosts, key=lambda host: host.name):
        here = [node for node in nodes if node.host == host.name]
        problem = "; ".join(missing_reasons(snapshot, host))
        for node in here:
            if node.lane:
                wanted = not node.dynamic or node.lane <= host.further_lanes
                state = "open" if node.takes_jobs else "drained" if node.up else "down"
                reason = "; ".join(filter(None, (node.closed_reason, problem if node.dynamic else "")))
                yield LaneRow(host.name, node.name, node.dynamic, wanted, state, reason)
        first = next((node.name for node in here if node.lane == 0), host.name)
        names = [f"{first}-l{lane}" for lane in range(1, host.further_lanes + 1)]
        for name in sorted(set(names) - {node.name for node in here}):
            yield LaneRow(host.name, name, on_demand=True, wanted=True, state="absent", reason=problem)


def _ask(hosts: tuple[str, ...], count: int, config: Path | None) -> None:
    from cadenza.slurm_plugin.service.lanes_on_demand import LaneRequest, refusal_reason, write  # noqa: PLC0415

    snapshot, settings = _last(config)
    known = {host.name for host in snapshot.hosts}
    if unknown := [host for host in hosts if host not in known]:
        raise click.ClickException(f"{', '.join(unknown)}: the last round saw no such host")
    for host in hosts if count else ():
        if reason := refusal_reason(snapshot, host, settings.guard.partitions):
            raise click.ClickException(f"{host}: {reason}")
    for host in hosts:
        write(Path(settings.service.store), LaneRequest(host, count))
    if count and not settings.applies:
        say('the mode is "observe": the lanes open when it is "apply"')
    say("see `cadenza lanes list` from the next round on")


def _last(config: Path | None) -> tuple[ClusterSnapshot, Settings]:
    """Return the cluster of the last round, and the settings; raise ClickException without a round."""
    from cadenza.slurm_plugin.service.settings import load_settings  # noqa: PLC0415
    from cadenza.slurm_plugin.service.store.reader import StoreReader  # noqa: PLC0415

    settings = load_settings(config)
    with StoreReader(Path(settings.service.store)) as reader:
        last = reader.round()
    if last is None:
        raise click.ClickException("no round is on record yet: is cadenzad running?")
    return last.snapshot, settings
