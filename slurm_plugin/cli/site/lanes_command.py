"""``cadenza lanes``: further lanes, listed, and those on demand opened and closed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from cadenza.policies.core.model import ClusterSnapshot
from cadenza.sidecar.bounds import MAX_LANES
from cadenza.slurm_plugin.cli.common import config_option, emit, json_option, say
from cadenza.slurm_plugin.errors import NO_ROUND
from cadenza.slurm_plugin.service.lanes_on_demand import LaneRequest, missing_reasons, refusal_reason, write
from cadenza.slurm_plugin.service.settings import Settings, load_settings
from cadenza.slurm_plugin.service.store.reader import StoreReader


class LaneRow(msgspec.Struct, frozen=True):
    """One further lane: its node in Slurm, and why it takes no jobs, empty if it does."""

    host: str
    node: str
    on_demand: bool
    wanted: bool
    state: str
    """open | drained | down | absent"""
    reason: str = ""


@click.command("lanes")
@click.argument("hosts", nargs=-1, metavar="[HOST]...")
@click.option("--count", type=click.IntRange(0, MAX_LANES), help="Let each HOST have this many lanes above lane 0.")
@json_option
@config_option
def lanes(*, hosts: tuple[str, ...], count: int | None, as_json: bool, config: Path | None) -> None:
    """List the lanes above lane 0 of all hosts, or of each HOST, as the last round saw them; or change their number.

    With --count the service opens and closes lanes that are not in slurm.conf, while its mode is "apply": the host's
    agent starts a slurmd for each, which registers the lane in Slurm. A lane that is to close is drained at once, and
    leaves Slurm when the last job on it has ended. All close when the mode is "observe".
    """
    snapshot, settings = _last(config)
    if count is not None:
        _ask(hosts, count, snapshot, settings)
        return
    rows = [row for row in rows_of(snapshot) if not hosts or row.host in hosts]
    if as_json:
        emit("cadenza.lanes/1", rows)
        return
    for row in rows:
        kind = "on demand" if row.on_demand else "in slurm.conf"
        say(f"{row.node}: {row.state}, {kind}" + (f": {row.reason}" if row.reason else ""))
    if not rows:
        say("no host has a further lane")


def rows_of(snapshot: ClusterSnapshot) -> Iterator[LaneRow]:
    """Yield all further lanes, in Slurm or wanted, by host."""
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


def _ask(hosts: tuple[str, ...], count: int, snapshot: ClusterSnapshot, settings: Settings) -> None:

    if not hosts:
        raise click.UsageError("--count needs the hosts whose number of lanes to change")
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
    say("see `cadenza lanes` from the next round on")


def _last(config: Path | None) -> tuple[ClusterSnapshot, Settings]:
    """Return the cluster of the last round, and the settings; raise ClickException without a round."""
    settings = load_settings(config)
    with StoreReader(Path(settings.service.store)) as reader:
        last = reader.round()
    if last is None:
        raise click.ClickException(NO_ROUND)
    return last.snapshot, settings
