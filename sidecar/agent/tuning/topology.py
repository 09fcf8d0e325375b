"""The host's CPUs as the kernel shows them in sysfs: hardware threads, cores, NUMA nodes, and where GPUs sit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from cadenza.sidecar.agent.ipc.processes import text_of

CPUS = Path("sys/devices/system/cpu")
NODES = Path("sys/devices/system/node")
NVIDIA = Path("proc/driver/nvidia/gpus")
PCI = Path("sys/bus/pci/devices")


class Cpu(NamedTuple):
    """One hardware thread: its number, the least number of its core's threads, its NUMA node."""

    id: int
    core: int
    node: int


@dataclass(frozen=True)
class Topology:
    """CPUs and memory (MB) of the host; ``gpu_nodes`` has each GPU's NUMA node by Slurm's index."""

    cpus: tuple[Cpu, ...]
    memory_mb: int
    gpu_nodes: Mapping[int, int] = field(default_factory=dict)

    def nodes_of(self, gpus: Iterable[int]) -> frozenset[int]:
        """Return the known NUMA nodes of some GPUs."""
        return frozenset(self.gpu_nodes[gpu] for gpu in gpus if gpu in self.gpu_nodes)


def read(root: Path = Path("/")) -> Topology:
    """Return the topology of the machine under ``root``; offline CPUs are left out.

    Files are those of Documentation/ABI (sysfs-devices-system-cpu, -node) and of the NVIDIA driver's
    ``/proc/driver/nvidia``. A kernel without NUMA has one node, 0.
    """
    online = parse(text_of(root / CPUS / "online"))
    node_of = {
        cpu: int(folder.name.removeprefix("node"))
        for folder in sorted((root / NODES).glob("node[0-9]*"))
        for cpu in parse(text_of(folder / "cpulist"))
    }
    core_of = {
        cpu: min(parse(text_of(root / CPUS / f"cpu{cpu}/topology/thread_siblings_list")), default=cpu) for cpu in online
    }
    cpus = tuple(Cpu(cpu, core_of[cpu], node_of.get(cpu, 0)) for cpu in sorted(online))
    lines = text_of(root / "proc/meminfo").splitlines()
    memory_kb = next((int(line.split()[1]) for line in lines if line.startswith("MemTotal:")), 0)
    return Topology(cpus, memory_kb >> 10, dict(_gpu_nodes(root)))


def _gpu_nodes(root: Path) -> Iterable[tuple[int, int]]:
    """Yield the minor number, which is Slurm's index (gres.conf(5), File), and NUMA node of each NVIDIA GPU."""
    for folder in sorted((root / NVIDIA).glob("*")):
        lines = text_of(folder / "information").splitlines()
        minor = next((line.split(":")[1] for line in lines if line.startswith("Device Minor")), "")
        node = text_of(root / PCI / folder.name / "numa_node")
        if minor.strip().isdigit() and node.isdigit():  # -1: unknown to the firmware
            yield int(minor), int(node)


def parse(text: str) -> frozenset[int]:
    """Return the numbers of a kernel list.

    >>> sorted(parse("0-2,8"))
    [0, 1, 2, 8]
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)
