"""Hosts of a cluster from ``scontrol show node --json``, as a simulation takes them, and as they are now (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import GPU_MEMORY_GB, MAX_GPUS
from cadenza.policies.inputs.csv_table import suggest
from cadenza.slurm_plugin.gateway.eligibility import Site
from cadenza.slurm_plugin.gateway.slurm_json import NotSlurms, left_out, read_nodes
from cadenza.slurm_plugin.gateway.slurm_values import gpu_types
from cadenza.slurm_plugin.gateway.translate import nodes as translated

MOST_NAMED = 5
RESERVED = ("MAINTENANCE", "RESERVED", "BLOCKED")
"""Flags of hosts that no job at large gets: a reservation has them, or a job with its part of the topology alone."""


@dataclass(frozen=True)
class Hosts:
    """Hosts with GPUs, lane 0 of each with what Slurm has given out of the host, and sentences on those left out."""

    nodes: tuple[Node, ...]
    notes: tuple[str, ...] = ()
    features: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Features of each node, by its name; empty where they are not known."""
    host_of: Mapping[str, str] = field(default_factory=dict)
    """The name of lane 0 on the host of each node."""
    site: Site | None = None
    """The site, for the constraints of jobs."""
    partitions: frozenset[str] = frozenset()
    """Partitions of all hosts with GPUs, also of those that are powered down."""


def read_hosts(text: str, source: str, partition: str | None = None, used: frozenset[str] | None = None) -> Hosts:
    """Return the hosts with GPUs of a file of ``scontrol show node --json``.

    They are in the partitions that Slurm names, or in ``partition`` alone. Several lanes of one host count once. A host
    of a cloud that is powered down, and one that is down or drained, count if they are among ``used``, the nodes that
    jobs of the past had. Hosts that are left out are named. Raise InputError for another file, and for one without
    GPUs; where all hosts are powered down, there are none, and a note.
    """
    # 1. The nodes that can be read, and those of them that count.
    try:
        raws, refused = read_nodes(text)
    except NotSlurms as error:
        raise InputError(f"{source}: not the JSON of scontrol show node --json: {error}") from None
    notes = [f"{source}: {said}"] if (said := left_out(refused, "nodes")) else []
    states = {raw["name"]: frozenset(raw["state"].split("+")) for raw in raws}
    parts = {raw["name"]: raw["divided_gpus"] for raw in raws if raw["divided_gpus"]}
    all_nodes = [replace(node, gpus=max(node.gpus - parts.get(node.name, 0), 0)) for node in translated(raws)]
    if parts:
        named = _named([f"{name} ({count})" for name, count in parts.items()])
        notes.append(f"GPUs of which jobs have parts (gres/shard, gres/mps), and are left out: {named}.")
    hosts, asleep = _kept(all_nodes, states, partition, used or frozenset(), notes)
    if mixed := [raw["name"] for raw in raws if raw["name"] in hosts and len(gpu_types(raw["configured_gres"])) > 1]:
        notes.append(f"Hosts with GPUs of several types, which all count as the first of them: {_named(mixed)}.")
    if not hosts and not asleep:
        place, hint = "", f"; {notes[-1]}" if notes else ""
        if partition:
            place = f" of partition {partition!r}"
            hint = hint or f"; {suggest(partition, sorted({name for node in all_nodes for name in node.partitions}))}"
        raise InputError(f"{source}: no node{place} has GPUs{hint}")
    # 2. What Slurm has given out on all lanes of each. A host has the name of its lane 0 here.
    name_of = {node.host: node.name for node in hosts.values()}
    lanes = [node for node in all_nodes if node.host in name_of]
    taken = {name: [flag] for flag in RESERVED for name, flags in states.items() if flag in flags}
    gpus_used, memory_mb = Counter[str](), Counter[str]()
    for lane in lanes:
        gpus_used[lane.host] += lane.gpus_used
        memory_mb[lane.host] += lane.memory_used_mb
    found = tuple(
        replace(
            node, host=node.name, gpus_used=min(gpus_used[node.host], node.gpus), memory_used_mb=memory_mb[node.host],
            gpu_memory_gb=GPU_MEMORY_GB.get(node.gpu_type.upper()),
            partitions=(partition,) if partition else node.partitions, drained=node.drained or node.name in taken,
            drain_reason=node.drain_reason or "".join(f"Slurm shows it as {flag}" for flag in taken.get(node.name, ())),
        )
        for node in hosts.values()
    )  # fmt: skip
    site = Site.of({"time_s": 0.0, "nodes": raws}, all_nodes)
    host_of = {lane.name: name_of[lane.host] for lane in lanes}
    partitions = {name for node in (*hosts.values(), *asleep) for name in node.partitions}
    return Hosts(
        found, tuple(notes), site.features, host_of, site, frozenset((partition,) if partition else partitions)
    )


def _kept(
    nodes: Iterable[Node], states: Mapping[str, frozenset[str]], partition: str | None, used: frozenset[str],
    notes: list[str],
) -> tuple[dict[str, Node], list[Node]]:  # fmt: skip
    """Return lane 0 of each host that counts, by its name, and of those that are powered down.

    Add sentences on those that are left out.
    """
    kept: dict[str, Node] = {}
    asleep, closed, odd = list[Node](), list[str](), list[str]()
    for node in nodes:
        # FUTURE is a line of slurm.conf for a host that need not exist (slurm.conf(5), State).
        if node.lane or not node.gpus or "FUTURE" in states[node.name]:
            continue
        if partition is not None and partition not in node.partitions:
            continue
        # No answer of Slurm says how many hosts of a cloud that are powered down a site would pay for.
        if node.asleep and "CLOUD" in states[node.name] and node.name not in used:
            asleep.append(node)
        # A host that is down or drained, and had no job of the past, may have been so all the time.
        elif used and node.name not in used and any(states[node.name]) and not (node.asleep or node.takes_jobs):
            closed.append(node.name)
        elif node.gpus > min(MAX_GPUS, node.cpus):
            odd.append(f"{node.name} ({node.gpus} GPUs, {node.cpus} CPUs)")
        else:
            kept[node.name] = node
    if asleep:
        notes.append(
            f"Hosts of a cloud that are powered down, and are left out: {_named([node.name for node in asleep])}."
        )
    if closed:
        notes.append(f"Hosts that are down or drained and had no job of the past, and are left out: {_named(closed)}.")
    if odd:
        notes.append(f"Hosts with more GPUs than CPUs or than {MAX_GPUS}, which are left out: {_named(odd)}.")
    return kept, asleep


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return printable(", ".join(names[:MOST_NAMED]), 1000) + more


def with_lanes(nodes: Iterable[Node], lanes: int) -> tuple[Node, ...]:
    """Return the hosts among the nodes as a simulation begins with them: up, empty, each with as many lanes."""
    return tuple(
        replace(
            host, name=f"{host.name}-l{lane}" if lane else host.name, lane=lane, up=True, asleep=False, drained=False,
            drain_reason="", weight=1, cpus_used=0, memory_used_mb=0, gpus_used=0, ending_s=0.0,
        )
        for host in nodes
        if host.lane == 0
        for lane in range(lanes)
    )  # fmt: skip
