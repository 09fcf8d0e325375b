"""Nodes of a cluster from ``scontrol show node --json``, as a simulation takes them (pure)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, NamedTuple

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.text import printable
from cadenza.policies.inputs.cluster import GPU_MEMORY_GB, MAX_CPUS, MAX_GPUS, MAX_NODES
from cadenza.slurm_plugin.cli.whatif.job_records import gpus_in, tres_of
from cadenza.slurm_plugin.gateway.translate import is_asleep, is_up

GPUS = re.compile(r"gpu(?::([A-Za-z0-9][A-Za-z0-9_.-]{0,63}))?:(\d{1,6})(?:\([^)]*\))?", re.ASCII)
ASLEEP_CLOUD = frozenset({"CLOUD", "POWERED_DOWN"})
"""States of a host of a cloud that is not there: no answer says how many of them a site would pay for."""
MOST_NAMED = 5
Word = Annotated[str, msgspec.Meta(max_length=4096)]


class _Node(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    cpus: Annotated[int, msgspec.Meta(ge=1, le=MAX_CPUS)]
    real_memory: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    hostname: Word = ""
    gres: Word = ""
    gres_used: Word = ""
    partitions: tuple[Word, ...] = ()
    state: tuple[Word, ...] = ()
    alloc_memory: Annotated[int, msgspec.Meta(ge=0, le=10**12)] = 0
    tres_used: Word | None = ""
    reason: Word = ""


class _Answer(msgspec.Struct, frozen=True):
    nodes: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_NODES)]


class Hosts(NamedTuple):
    """Hosts with GPUs, lane 0 of each, and sentences on those that are left out."""

    nodes: tuple[Node, ...]
    notes: tuple[str, ...]


def read_hosts(text: str, source: str, partition: str | None = None) -> Hosts:
    """Return the hosts with GPUs of a file of ``scontrol show node --json``.

    They are in the partitions that Slurm names, or in ``partition`` alone. Several nodes of one host, as lanes are,
    count once. Hosts that cannot be simulated are left out, each with its name. Raise InputError for another file, and
    for one without GPUs.
    """
    rows, notes = _decode(text, source)
    return Hosts(tuple(_hosts(rows, source, partition, notes).values()), tuple(notes))


def read_nodes(text: str, source: str, lanes: int, partition: str | None = None) -> tuple[Node, ...]:
    """Return the hosts of ``read_hosts``, each with its lanes."""
    return with_lanes(read_hosts(text, source, partition).nodes, lanes)


class LiveHosts(NamedTuple):
    """Hosts with GPUs as they are now: lane 0 with what Slurm has given out of the host, and the host of each node."""

    nodes: tuple[Node, ...]
    host_of: dict[str, str]
    notes: tuple[str, ...] = ()


def read_live_hosts(text: str, source: str, partition: str | None = None) -> LiveHosts:
    """Return the hosts with GPUs of an answer of ``scontrol show node --json``; raise InputError as ``read_nodes``."""
    rows, notes = _decode(text, source)
    hosts = _hosts(rows, source, partition, notes)
    used: Counter[str] = Counter()
    memory_mb: Counter[str] = Counter()
    first: dict[str, _Node] = {}
    host_of = {}
    for row in sorted(rows, key=lambda row: row.name):
        name = row.hostname or row.name
        host_of[row.name] = name
        try:
            counted = round(gpus_in(tres_of(row.tres_used or "", f"{source}: node {row.name!r}: tres_used")))
        except InputError as error:
            notes.append(f"{error}.")
            counted = 0
        # Without gres/gpu in AccountingStorageTRES only the list of GRES tells.
        used[name] += counted or gpus_of(row.gres_used)
        memory_mb[name] += row.alloc_memory
        first.setdefault(name, row)
    nodes = tuple(
        replace(
            host, gpus_used=min(used[name], host.gpus), memory_used_mb=memory_mb[name], up=is_up(first[name].state),
            asleep=is_asleep(first[name].state), drained="DRAIN" in first[name].state,
            drain_reason=printable(first[name].reason),
        )
        for name, host in hosts.items()
    )  # fmt: skip
    return LiveHosts(nodes, {name: host for name, host in host_of.items() if host in hosts}, tuple(notes))


def _decode(text: str, source: str) -> tuple[list[_Node], list[str]]:
    """Return the nodes that can be read, and a sentence on the others."""
    try:
        raws = msgspec.json.decode(text, type=_Answer).nodes
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not the JSON of scontrol show node --json: {error}") from None
    rows, bad = [], []
    for at, raw in enumerate(raws):
        try:
            rows.append(msgspec.json.decode(raw, type=_Node))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            bad.append(f"nodes[{at}]: {error}")
    return rows, [f"{source}: {len(bad)} nodes cannot be read ({printable(bad[0], 200)})."] if bad else []


def _hosts(rows: Iterable[_Node], source: str, partition: str | None, notes: list[str]) -> dict[str, Node]:
    """Return lane 0 of each host with GPUs; add a sentence on those that are left out."""
    hosts: dict[str, Node] = {}
    asleep, odd = [], []
    for node in sorted(rows, key=lambda node: node.name):
        kinds, gpus = GPUS.findall(node.gres), gpus_of(node.gres)
        if not gpus or "FUTURE" in node.state or (partition and partition not in node.partitions):
            continue
        if set(node.state) >= ASLEEP_CLOUD:
            asleep.append(node.name)
            continue
        if gpus > MAX_GPUS or gpus > node.cpus:
            odd.append(f"{node.name} ({gpus} GPUs, {node.cpus} CPUs)")
            continue
        kind = kinds[0][0]
        host = node.hostname or node.name
        hosts.setdefault(
            host,
            Node(
                name=host, host=host, lane=0, gpus=gpus, cpus=node.cpus, memory_mb=node.real_memory, gpu_type=kind,
                gpu_memory_gb=GPU_MEMORY_GB.get(kind.upper()),
                partitions=(partition,) if partition else node.partitions,
            ),
        )  # fmt: skip
    if asleep:
        notes.append(f"Hosts of a cloud that are powered down, and are left out: {_named(asleep)}.")
    if odd:
        notes.append(f"Hosts with more GPUs than CPUs or than {MAX_GPUS}, which are left out: {_named(odd)}.")
    if not hosts:
        place = f" of partition {partition!r}" if partition else ""
        raise InputError(f"{source}: no node{place} has GPUs")
    return hosts


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
    return printable(", ".join(names[:MOST_NAMED]), 1000) + more


def gpus_of(gres: str) -> int:
    """Return the GPUs of a list such as gpu:a100:4(IDX:0-3),gpu:v100:2."""
    return sum(int(count) for _, count in GPUS.findall(gres))


def with_lanes(nodes: Iterable[Node], lanes: int) -> tuple[Node, ...]:
    """Return the hosts among the nodes, each with as many lanes."""
    return tuple(
        replace(host, name=f"{host.name}-l{lane}", lane=lane) if lane else host
        for host in nodes
        if host.lane == 0
        for lane in range(lanes)
    )
