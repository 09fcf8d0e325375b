"""The preloaded library that serves cudaMalloc by virtual memory (sidecar/agent/addresses): its place and its calls."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cadenza.sidecar import wire

ADDRESSES_ENV = "CADENZA_ADDRESSES"
"""Set to STAY by ``cadenza run --graphs``, or by the user: the process asks for addresses that stay."""
STAY = "stay"
NAME = "libcadenza-addresses.so"
PACKAGE = Path(__file__).resolve().parents[3] / "agent" / "addresses" / NAME
"""The library where the agent is installed with this client."""
NCCL_GRAPHS = "NCCL_GRAPH_REGISTER"
"""NCCL registers the buffers of captured collectives with the other ranks, whose mappings would not survive a yield."""
OUT_OF_MEMORY = 2


class Segment(ctypes.Structure):
    """``struct cadenza_segment`` of addresses.h."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("away", ctypes.c_int32),
    )


class Counters(ctypes.Structure):
    """``struct cadenza_counters`` of addresses.h."""

    _fields_ = (
        ("segments", ctypes.c_uint64),
        ("live_bytes", ctypes.c_uint64),
        ("away_bytes", ctypes.c_uint64),
        ("passed", ctypes.c_uint64),
        ("passed_bytes", ctypes.c_uint64),
        ("exports_refused", ctypes.c_uint64),
        ("failures", ctypes.c_uint64),
        ("last_failure", ctypes.c_int32),
        ("no_driver", ctypes.c_int32),
    )


class Library:
    """The library in this process; its errors are codes of CUDA, 0 for success."""

    def __init__(self, calls: ctypes.CDLL) -> None:
        self._list = calls.cadenza_addresses_list
        self._list.restype = ctypes.c_size_t
        self._list.argtypes = [ctypes.POINTER(Segment), ctypes.c_size_t]
        self._yield = calls.cadenza_addresses_yield
        self._yield.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
        self._resume = calls.cadenza_addresses_resume
        self._count = calls.cadenza_addresses_count
        self._count.argtypes = [ctypes.POINTER(Counters)]
        self._count.restype = None

    def segments(self) -> Sequence[Segment]:
        """Return the segments by address."""
        room = 0
        while True:
            found = (Segment * room)()
            count = self._list(found, room)
            if count <= room:
                return found[:count]
            room = count + 64  # other threads may add some

    def release(self, numbers: Sequence[int]) -> int:
        """Let the memory of segments go, whose content was copied; return the error."""
        return int(self._yield((ctypes.c_uint64 * len(numbers))(*numbers), len(numbers)))

    def resume(self) -> int:
        """Give all segments memory again, or after an error none; return the error."""
        return int(self._resume())

    def counters(self) -> Counters:
        """Return the library's figures."""
        found = Counters()
        self._count(found)
        return found


@functools.cache
def library() -> Library | None:
    """Return the library if it was preloaded into this process."""
    # With NULL the names of the whole process are searched, those of LD_PRELOAD among them (dlopen(3)).
    calls = ctypes.CDLL(None)
    return Library(calls) if hasattr(calls, "cadenza_addresses_list") else None


def path() -> Path | None:
    """Return the place of the library on this host, None without one.

    The agent links that of its own package next to its socket, which may be in another environment than this client.
    """
    link = Path(os.environ.get(wire.SOCKET_ENV) or wire.DEFAULT_SOCKET).with_name(NAME)
    return next((place.resolve() for place in (link, PACKAGE) if place.is_file()), None)


def environment(environ: Mapping[str, str], place: Path) -> dict[str, str]:
    """Return the environment of a program that gets the library; two of them would both serve cudaMalloc."""
    others = [one for one in environ.get("LD_PRELOAD", "").replace(":", " ").split() if Path(one).name != NAME]
    preload = os.pathsep.join([str(place), *others])
    return {NCCL_GRAPHS: "0", **environ, "LD_PRELOAD": preload, ADDRESSES_ENV: STAY}
