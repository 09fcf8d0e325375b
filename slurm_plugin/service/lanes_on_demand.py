"""Lanes on demand: the hosts that are to have some, the orders to their agents, and why a lane is not there.

A host has as many as ``cadenza lanes`` last asked for, in a folder next to the store where only root and the service's
own user may write, else as many as the settings say; none while the service observes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from cadenza.policies.core.model import ClusterSnapshot, Host, Node
from cadenza.policies.sharing.turns.lanes import WEIGHT_STEP
from cadenza.sidecar.bounds import Name
from cadenza.sidecar.orders import LaneOrder
from cadenza.slurm_plugin.errors import RequestError
from cadenza.slurm_plugin.service import request_files
from cadenza.slurm_plugin.service.settings import LaneCount, Settings

log = logging.getLogger(__name__)

BASE_PORT = 6830
"""The slurmd of lane k listens on the port k above it, or on the next free one where slurm.conf names its port.

Slurm's own daemons have 6817 to 6820."""
MIN_MEMORY = 0.25
"""Least memory of a lane, as a part of lane 0's."""


class LaneRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of further lanes that an admin asked for on a host."""

    host: Name
    lanes: LaneCount


# --- Requests ----------------------------------------------------------------------------------------------


def folder(store: Path) -> Path:
    """Return the folder of requests to a store's service."""
    return request_files.folder(store, "lanes")


def write(store: Path, request: LaneRequest) -> None:
    """Write a request, in place of the host's earlier one; raise RequestError when this user may not."""
    request_files.write(folder(store) / f"{request.host}.json", request, "open and close lanes")


def requests(store: Path) -> Mapping[str, int]:
    """Return the lanes that were asked for, by host; a request that cannot be read is logged and left out.

    Raise RequestError for a user who may not read them.
    """
    found = {}
    try:
        paths = sorted(path for path in folder(store).iterdir() if path.suffix == ".json")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RequestError(f"{folder(store)}: {error.strerror}") from None
    for path in paths:
        try:
            request = msgspec.json.decode(path.read_bytes(), type=LaneRequest)
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            log.warning("%s: no request that can be read: %s", path, error)
        else:
            found[request.host] = request.lanes
    return found


def refusal_reason(snapshot: ClusterSnapshot, host: str, partitions: Collection[str]) -> str | None:
    """Return why a host can have no lanes on demand; None if it can."""
    nodes = snapshot.on_host.get(host, ())
    first = next((node for node in nodes if node.lane == 0), None)
    static = next((node for node in nodes if node.lane and not node.dynamic), None)
    if first is None:
        return "Slurm has no node on this host"
    if static is not None:
        return f"slurm.conf has its lane {static.name}"
    if not first.gpus:
        return f"{first.name} has no GPUs"
    foreign = sorted(set(first.partitions) - set(partitions))
    if foreign or not first.partitions:
        return f"{first.name} is in {', '.join(foreign) or 'no partition'}, and not in managed partitions only"
    return None


# --- Each round --------------------------------------------------------------------------------------------


def with_lanes(snapshot: ClusterSnapshot, asked: Mapping[str, int], settings: Settings) -> ClusterSnapshot:
    """Return the snapshot with the number of lanes that each host is to have on demand, and their memory (pure)."""
    shares = settings.applies and settings.policy.share != "none"

    def lanes(host: Host) -> int:
        number = asked.get(host.name, settings.service.lanes_on_demand) if shares else 0
        return number if number and refusal_reason(snapshot, host.name, settings.guard.partitions) is None else 0

    full = settings.service.lanes_memory == "full"
    hosts = tuple(replace(host, further_lanes=lanes(host), full_memory=full) for host in snapshot.hosts)
    return replace(snapshot, hosts=hosts)


def lane_orders(snapshot: ClusterSnapshot, host: Host, *, opens: bool) -> tuple[LaneOrder, ...]:
    """Return the lanes on demand of a host's agent (pure): those that Slurm has, and if ``opens`` the wanted ones."""
    first, there = _nodes(snapshot, host.name)
    if first is None:
        return ()
    wanted = range(1, host.further_lanes + 1) if opens and _memory_mb(host, first) is not None else ()
    memory_mb = _memory_mb(host, first) or first.memory_mb
    orders = (
        LaneOrder(
            first.name,
            lane,
            BASE_PORT + lane,
            first.cpus,
            memory_mb,
            first.gpus,
            first.gpu_type,
            first.weight + WEIGHT_STEP * lane,
            known=lane in there,
        )
        # The slurmd of a lane that is not wanted runs on until Slurm has deleted the node.
        for lane in sorted({*there, *wanted})
    )
    return tuple(order for order in orders if _can_be_read(order))


def missing_reasons(snapshot: ClusterSnapshot, host: Host) -> Iterator[str]:
    """Yield why lanes on demand of a host are not there, or stay although they are not wanted (pure)."""
    yield from host.lane_faults
    first, there = _nodes(snapshot, host.name)
    if first is None or not host.further_lanes:
        return
    if not host.agent_alive:
        yield f"the agent of {host.name} {host.refused or 'is not alive'}"
    elif _memory_mb(host, first) is None:
        yield (
            f"lane 0 has {first.memory_mb} MB of the {host.memory_mb} MB of {host.name}: lower its RealMemory, because "
            "lanes share the host's memory (service.lanes_memory)"
        )
    else:
        # Beyond MaxNodeCount slurmctld only logs that it refused a node: its slurmd runs on and says nothing.
        missing = [lane for lane in range(1, host.further_lanes + 1) if lane not in there]
        if missing and not host.lane_faults:
            names = ", ".join(f"{first.name}-l{lane}" for lane in missing)
            yield f"Slurm does not know {names} yet; if this lasts, slurm.conf needs a higher MaxNodeCount"
        for node in there.values():
            # A dynamic node comes into a partition by a NodeSet with its feature, or by Nodes=ALL; one that is added by
            # an update of the partition is out of it again after a reconfigure.
            if not node.partitions:
                yield f"{node.name} is in no partition: slurm.conf needs a NodeSet with its feature lane{node.lane}"


def _nodes(snapshot: ClusterSnapshot, host: str) -> tuple[Node | None, Mapping[int, Node]]:
    """Return lane 0 of a host, and its lanes on demand that Slurm has."""
    nodes = snapshot.on_host.get(host, ())
    first = next((node for node in nodes if node.lane == 0), None)
    return first, {node.lane: node for node in nodes if node.lane and node.dynamic}


def _can_be_read(order: LaneOrder) -> bool:
    """Return True if the agent's decoder takes an order; another one would cost it all facts."""
    try:
        msgspec.convert(msgspec.to_builtins(order), LaneOrder)
    except msgspec.ValidationError as error:
        log.warning("lane %s cannot be ordered: %s", order.node, error)
        return False
    return True


def _memory_mb(host: Host, first: Node) -> int | None:
    """Return the memory of each lane on demand: as much as lane 0's if the host has it left; None if too little is.

    With full memory that is no question. Of a host that was not heard nothing is known.
    """
    if not host.memory_mb:
        return None
    # Where lane 0 claims more than the host has, as on test clusters, every lane claims as much.
    if host.full_memory or host.memory_mb < first.memory_mb:
        return first.memory_mb
    left_mb = min(first.memory_mb, (host.memory_mb - first.memory_mb) // max(host.further_lanes, 1))
    return left_mb if left_mb >= MIN_MEMORY * first.memory_mb else None
