"""Clusters as one line of text: ``16x8:24:500`` are 16 nodes of 8 GPUs, 24 CPUs and 500 GB."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Node
from cadenza.policies.core.profile import MB_PER_GB
from cadenza.policies.inputs.csv_table import integer, number, quoted

PARTITION = "sim"
SHAPE = "NODESxGPUS:CPUS:MEMORY_GB[:TYPE], for example 16x8:24:500 or 8x4:12:448:P40,8x4:12:448:P100"
KIND = re.compile(r"([^x:]+)x([^:]+):([^:]+):([^:]+)(?::([A-Za-z0-9][A-Za-z0-9_.-]{0,63}))?", re.ASCII)
MAX_NODES = 100_000
MAX_GPUS = 1024
MAX_CPUS = 100_000
MAX_LANES = 8
GPU_MEMORY_GB = {"T4": 16.0, "P40": 24.0, "P100": 16.0, "L4": 24.0, "L40": 48.0, "H100": 80.0, "H200": 141.0}
"""Memory of types that come in one size, by their makers' data sheets; other types have no known size."""


def read_cluster(text: str, lanes: int = 1) -> tuple[Node, ...]:
    """Return the nodes of a cluster, in order of their names.

    Nodes are called ``n0001`` and on, with enough digits that the order of the names is that of the numbers. Lane
    k > 0 of a host is the node ``NAME-lk``. Memory is in MB of 1024 to the GB. Raise InputError, naming the part
    of the text that is wrong.
    """
    if not 1 <= lanes <= MAX_LANES:
        raise InputError(f"lanes: {lanes} is not from 1 to {MAX_LANES}")
    kinds = [_kind(part.strip(), f"cluster {quoted(text)}") for part in text.split(",")]
    total = sum(count for count, _ in kinds)
    if total > MAX_NODES:
        raise InputError(f"cluster {quoted(text)}: {total} nodes are more than {MAX_NODES}")
    width = max(4, len(str(total)))
    nodes: list[Node] = []
    for count, kind in kinds:
        first = len(nodes) // lanes + 1
        for position in range(first, first + count):
            host = f"n{position:0{width}d}"
            names = [host, *(f"{host}-l{lane}" for lane in range(1, lanes))]
            nodes += [replace(kind, name=name, host=host, lane=lane) for lane, name in enumerate(names)]
    return tuple(nodes)


def widest_nodes(nodes: Iterable[Node]) -> dict[str, Node]:
    """Return the node with the most GPUs of each partition: its parts for each GPU are what a job gets unasked."""
    found: dict[str, Node] = {}
    for node in sorted(nodes, key=lambda node: (node.gpus, node.cpus, node.name)):
        found.update(dict.fromkeys(node.partitions, node))
    return found


def _kind(part: str, where: str) -> tuple[int, Node]:
    """Return the number of nodes in one part of the text, and one of them without a name."""
    found = KIND.fullmatch(part)
    if found is None:
        raise InputError(f"{where}: {quoted(part)} is not {SHAPE}")
    count, gpus_text, cpus, memory, gpu_type = found.groups()
    gpus = integer(gpus_text, f"{where}: GPUs", 1, MAX_GPUS)
    return integer(count, f"{where}: nodes", 1, MAX_NODES), Node(
        name="",
        host="",
        lane=0,
        gpus=gpus,
        cpus=integer(cpus, f"{where}: CPUs, at least one for each GPU", gpus, MAX_CPUS),
        memory_mb=int(number(memory, f"{where}: memory, at least 1 GB for each GPU", gpus, 1e6) * MB_PER_GB),
        gpu_type=gpu_type or "",
        gpu_memory_gb=GPU_MEMORY_GB.get(gpu_type or ""),
        partitions=(PARTITION,),
    )
