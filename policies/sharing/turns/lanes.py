"""Further lanes: closed in observe-only, and on a host where sharing would not be safe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from cadenza.policies.core.actions import DrainNode, NodeAction, OpenNode
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Node
from cadenza.policies.sharing.state.round_state import RoundState
from cadenza.policies.sharing.state.settings import SharingSettings
from cadenza.policies.sharing.turns.repair import MAX_REPAIRS, beyond_repair

OUR_DRAIN = "cadenza:"
"""Every drain of ours says so at the start of its reason; a drain without it is an admin's and stays."""


def drain_or_open_lanes(state: RoundState) -> None:
    """Close the further lanes of hosts where sharing is not safe, and open those that we closed."""
    state.outcome.lane_actions = lane_actions(state.snapshot, state.memory, state.settings)


def close_lanes(state: RoundState) -> None:
    """Close every further lane, because no job may share a GPU."""
    state.outcome.lane_actions = lane_actions(state.snapshot, state.memory, replace(state.settings, enforce=False))


def lane_actions(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> tuple[NodeAction, ...]:
    """Return the lanes to drain and to open, in order of node names.

    In observe-only every open further lane is drained, whoever opened it, because a job there would share a
    GPU with another. A lane is opened only when its drain is ours, or Slurm's own at a restart; the latter is all that
    is ever undone on lane 0. Hosts of another service's partitions are that one's.
    """
    if not any(node.lane or node.drained for node in snapshot.nodes):
        return ()
    ours = our_hosts(snapshot, settings.partitions)
    closed = _closed_hosts(snapshot, memory, settings)
    over = _lanes_over_stuck_jobs(snapshot)
    opens = settings.partitions if settings.enforce else frozenset()
    leaving = {name for job in snapshot.jobs if job.state == "OTHER" for name in job.nodes}
    actions: list[NodeAction] = []
    for node in sorted((node for node in snapshot.nodes if node.host in ours), key=lambda node: node.name):
        reason = closed.get(node.host, "") or over.get(node.name, "")
        if node.lane and reason and not node.drained:
            actions.append(DrainNode(node.name, f"{OUR_DRAIN} {reason}"))
        elif node.lane and not reason and node.drained and node.up and drained_by_us(node, memory):
            actions.append(OpenNode(node.name, f"sharing is on and the agent of {node.host} is alive"))
        elif (not node.lane or not reason) and reopens(node, opens) and node.name not in leaving:
            reason = f"Slurm drained it by itself ({node.drain_reason}), and no job ends there"
            actions.append(OpenNode(node.name, reason, drain=node.drain_reason))
    return tuple(actions)


def our_hosts(snapshot: ClusterSnapshot, partitions: Collection[str]) -> frozenset[str]:
    """Return the hosts whose lanes are this service's to open and close; all of them while it manages no partition.

    They have a node in a managed partition, or an agent that reports here, as after a partition is managed no more.
    """
    nodes = snapshot.nodes
    managed = {node.host for node in nodes if not partitions or not set(node.partitions).isdisjoint(partitions)}
    heard = {host.name for host in snapshot.hosts if host.agent_alive or host.agent_version or host.refused}
    return frozenset(managed | heard)


def _lanes_over_stuck_jobs(snapshot: ClusterSnapshot) -> dict[str, str]:
    """Return why no job may start on a further lane: it could get the GPUs of a job that cannot be stopped."""
    stuck = [job for job in snapshot.jobs if job.lease is not None and job.lease.stuck]
    taken: dict[str, set[Gpu]] = {}
    for job in snapshot.jobs if stuck else ():
        for name in job.nodes if job.lease is not None else ():
            taken.setdefault(name, set()).update(job.leased_gpus)
    found: dict[str, str] = {}
    for job in stuck:
        gpus = job.leased_gpus
        for node in snapshot.nodes if gpus else ():
            free = any(gpu.host == node.host and gpu not in taken.get(node.name, ()) for gpu in gpus)
            if node.lane and node.name not in job.nodes and free:
                found.setdefault(node.name, f"job {job.key} cannot be stopped, and its GPUs are free here")
    return found


def drained_by_us(node: Node, memory: Memory) -> bool:
    """Return True if the node's drain is ours to undo."""
    return node.name in memory.drained or node.drain_reason.startswith(OUR_DRAIN)


def reopens(node: Node, partitions: frozenset[str]) -> bool:
    """Return True if a node of these partitions alone was drained by Slurm at a restart of its own."""
    managed = bool(node.partitions) and partitions.issuperset(node.partitions)
    return managed and node.drained and node.up and node.drained_at_restart


def hosts_to_leave(snapshot: ClusterSnapshot) -> frozenset[str]:
    """Return the hosts whose lane 0 is drained: an admin wants the machine, or Slurm does not trust it."""
    # A drain at a restart of Slurm's own does not count: it is undone as soon as no job ends there.
    drained = (node for node in snapshot.nodes if node.lane == 0 and node.drained and not node.drained_at_restart)
    return frozenset(node.host for node in drained)


def _closed_hosts(snapshot: ClusterSnapshot, memory: Memory, settings: SharingSettings) -> dict[str, str]:
    """Return why the further lanes of a host must be closed, for the hosts where they must."""
    hosts = {node.host for node in snapshot.nodes}
    if not settings.enforce:
        return dict.fromkeys(hosts, "observe-only, no job may share a GPU")
    closed = {host: f"lane 0 of {host} is drained" for host in hosts_to_leave(snapshot)}
    for node in sorted(snapshot.nodes, key=lambda node: node.name):
        # Slurm starts jobs of those partitions on the host as well, and Cadenza may not stop them.
        foreign = sorted(set(node.partitions) - settings.partitions)
        if foreign:
            closed[node.host] = f"{node.name} is also in {', '.join(foreign)}, not among Cadenza's partitions"
    closed |= {host.name: host.taken[0] for host in snapshot.hosts if host.taken}
    host_of = snapshot.host_of
    for key, job in beyond_repair(snapshot, memory).items():
        reason = f"job {key} contradicts Slurm's word after {MAX_REPAIRS} repairs"
        closed |= {host_of[name]: reason for name in job.nodes if name in host_of}
    # Slurm counts the GPUs of each lane as if they were its own: only the agent keeps the jobs of two lanes apart.
    alive = {host.name for host in snapshot.hosts if host.agent_alive}
    return closed | {host: f"the agent of {host} is not alive" for host in hosts - alive}
