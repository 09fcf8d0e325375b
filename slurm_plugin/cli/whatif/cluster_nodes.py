"""Nodes of a cluster from ``scontrol show node --json``, as a simulation takes them (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

import msgspec

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.inputs.cluster import GPU_MEMORY_GB, MAX_CPUS, MAX_GPUS, MAX_NODES

GPUS = re.compile(r"gpu(?::([A-Za-z0-9][A-Za-z0-9_.-]{0,63}))?:(\d{1,6})(?:\([^)]*\))?", re.ASCII)
GONE = frozenset({"FUTURE", "CLOUD", "POWERED_DOWN"})
Word = Annotated[str, msgspec.Meta(max_length=4096)]


class _Node(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    cpus: Annotated[int, msgspec.Meta(ge=1, le=MAX_CPUS)]
    real_memory: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    hostname: Word = ""
    gres: Word = ""
    partitions: tuple[Word, ...] = ()
    state: tuple[Word, ...] = ()


class _Answer(msgspec.Struct, frozen=True):
    nodes: Annotated[tuple[_Node, ...], msgspec.Meta(max_length=MAX_NODES)]


def read_nodes(text: str, source: str, lanes: int, partition: str | None = None) -> tuple[Node, ...]:
    """Return the hosts with GPUs of a file of ``scontrol show node --json``, each with its lanes.

    They are in the partitions that Slurm names, or in ``partition`` alone. Several nodes of one host, as lanes are,
    count once. Raise InputError for another file, for one without GPUs, and
    for a host with fewer CPUs than GPUs.
    """
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"{source}: not the JSON of scontrol show node --json: {error}") from None
    hosts: dict[str, Node] = {}
    for node in sorted(answer.nodes, key=lambda node: node.name):
        kinds = GPUS.findall(node.gres)
        gpus = sum(int(count) for _, count in kinds)
        if not gpus or GONE & set(node.state) or (partition and partition not in node.partitions):
            continue
        if gpus > MAX_GPUS or gpus > node.cpus:
            raise InputError(f"{source}: node {node.name!r} has {gpus} GPUs, more than its CPUs or than {MAX_GPUS}")
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
    if not hosts:
        place = f" of partition {partition!r}" if partition else ""
        raise InputError(f"{source}: no node{place} has GPUs")
    return with_lanes(tuple(hosts.values()), lanes)


def with_lanes(nodes: Iterable[Node], lanes: int) -> tuple[Node, ...]:
    """Return the hosts among the nodes, each with as many lanes."""
    return tuple(
        replace(host, name=f"{host.name}-l{lane}", lane=lane) if lane else host
        for host in nodes
        if host.lane == 0
        for lane in range(lanes)
    )
