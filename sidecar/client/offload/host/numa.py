"""Host memory on the NUMA node of its GPU: copies to the other socket's memory share the link between the two."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import platform
from pathlib import Path

DEVICES, NODES = Path("sys/bus/pci/devices"), Path("sys/devices/system/node")
"""Directories of the kernel's view on PCI devices and on NUMA nodes, under the root."""
MBIND = {"x86_64": 237, "aarch64": 235, "ppc64le": 259}
"""Number of the system call mbind(2), which the C library does not have."""
PREFERRED = 1
"""MPOL_PREFERRED: other nodes serve when this one is full. A strict binding would end the job for want of memory."""
MAX_NODE = 1024

_log = logging.getLogger("cadenza.client")


def node_of(pci_address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device such as ``0000:3b:00.0``; None on a host with one node, or if not told."""
    with contextlib.suppress(OSError, ValueError):
        if len([*(root / NODES).glob("node[0-9]*")]) > 1:
            node = int((root / DEVICES / pci_address.lower() / "numa_node").read_text(encoding="ascii"))
            return node if 0 <= node < MAX_NODE else None  # -1: the firmware does not say
    return None


def prefer(memory: mmap.mmap, node: int) -> bool:
    """Have the pages of a mapping that are touched from now on come from a node; return False where that is refused.

    A container's seccomp filter may refuse it, and the node may be outside of the job's cpuset.
    """
    number = MBIND.get(platform.machine())
    if number is None:
        return False
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    bits = (ctypes.c_ulong * (MAX_NODE // (8 * ctypes.sizeof(ctypes.c_ulong))))()
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    bits[node // width] = 1 << node % width
    call = ctypes.CDLL(None, use_errno=True).syscall
    arguments = (number, start, len(memory), PREFERRED, ctypes.addressof(bits), MAX_NODE + 1, 0)
    if call(*map(ctypes.c_long, arguments)):
        _log.debug("host memory is not bound to NUMA node %d: %s", node, os.strerror(ctypes.get_errno()))
        return False
    return True
