"""Plan of a move: the storages that share a copy, and their places in host memory; no torch, no state."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

ALIGNMENT = 512
"""Bytes to which each storage's place is aligned: the caching allocator's own rounding."""
SMALL_BYTES = 2**20
"""Storages below this size share a copy: starting a transfer of their own would cost more than the transfer."""
STAGING_BYTES = 32 * 2**20
"""Most bytes of small storages in one copy; gathering them takes as much memory on the device."""


@dataclass(frozen=True)
class Batch:
    """One copy: the members lie one after the other in host memory, each in a multiple of the alignment."""

    members: tuple[int, ...]
    """Positions in the list of storages that was planned."""
    sizes: tuple[int, ...]
    """The members' bytes, without the alignment."""
    spans: tuple[int, ...]
    """The members' bytes with the alignment."""
    device: Any
    """The members' device, as it was given."""
    offset: int
    nbytes: int
    """The batch's place in host memory, alignment included."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """The members' places in host memory."""
        return tuple(accumulate(self.spans[:-1], initial=self.offset))

    @property
    def gathered(self) -> bool:
        """True if several storages share this copy."""
        return len(self.members) > 1


@dataclass(frozen=True)
class Range:
    """Memory of a device that is copied as it is, and its place in host memory."""

    segment: int
    """Number of the allocator's segment that it is in, which is let go behind the copy."""
    device: Any
    address: int
    nbytes: int
    offset: int


@dataclass(frozen=True)
class AddressPlan:
    """A move of all segments of an allocator, whose addresses stay."""

    ranges: tuple[Range, ...]
    """In the order of the segments."""
    segments: tuple[int, ...]
    """The numbers of all segments, those without a block in use first."""
    devices: tuple[Any, ...]
    """The devices that the segments are on."""
    nbytes: int
    """Memory that leaves the devices, and that the way back takes."""

    @property
    def host_bytes(self) -> int:
        """Host memory that it needs."""
        return self.ranges[-1].offset + aligned(self.ranges[-1].nbytes) if self.ranges else 0


def plan(sizes: Sequence[tuple[Hashable, int]]) -> list[Batch]:
    """Divide storages, given as (device, bytes), into batches: small ones of a device together, others alone.

    Small ones come first; within both kinds the order is kept, and no byte of host memory belongs to two.
    """
    batches: list[Batch] = []
    for members in [*_packed(sizes), *([index] for index, (_, nbytes) in enumerate(sizes) if nbytes >= SMALL_BYTES)]:
        nbytes = tuple([sizes[index][1] for index in members])
        spans = tuple(map(aligned, nbytes))
        batches.append(Batch(tuple(members), nbytes, spans, sizes[members[0]][0], total(batches), sum(spans)))
    return batches


def total(batches: Sequence[Batch]) -> int:
    """Return the host memory, in bytes, that the batches take."""
    return batches[-1].offset + batches[-1].nbytes if batches else 0


def aligned(nbytes: int) -> int:
    """Round up to the alignment.

    >>> aligned(1), aligned(512), aligned(0)
    (512, 512, 0)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _packed(sizes: Sequence[tuple[Hashable, int]]) -> list[list[int]]:
    """Return the positions of small storages, in groups of one device and at most STAGING_BYTES."""
    groups: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index, (device, nbytes) in enumerate(sizes):
        if nbytes >= SMALL_BYTES:
            continue
        group, used = filling.get(device, ([], STAGING_BYTES))
        used += aligned(nbytes)
        if used > STAGING_BYTES:
            group, used = [], aligned(nbytes)
            groups.append(group)
        group.append(index)
        filling[device] = group, used
    return groups
