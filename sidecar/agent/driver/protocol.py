"""What the agent and its helper process say to each other: one msgspec struct a packet, over a socket pair."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cadenza.sidecar.agent.leases.lease_table import GpuProcess

MAX_PACKET = 1 << 17

Operation: TypeAlias = Literal["state", "lock", "checkpoint", "restore", "unlock"]


class Look(msgspec.Struct, frozen=True, tag=True):
    """Ask which processes of a job are on its GPUs, and whether they may be stopped."""

    id: int
    job: int
    uid: int
    gpus: tuple[int, ...]


class Call(msgspec.Struct, frozen=True, tag=True):
    """One call of the checkpoint API on one process, if it is still the one that is meant."""

    id: int
    operation: Operation
    pid: int
    start_ticks: int
    timeout_ms: int = 0
    """Of a lock: the driver gives up after this, and the process runs on."""
    pairs: tuple[tuple[str, str], ...] = ()
    """Of a restore: UUIDs of each GPU that the kernel driver shows, and of the one to restore it onto."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The helper's first word; ``problem`` says what the machine lacks, and the helper ends then."""

    cuda: int = 0
    """As cuDriverGetVersion has it: 12080 is the API of driver 570."""
    problem: str = ""


class Looked(msgspec.Struct, frozen=True, tag=True):
    """The answer to Look; with ``refused`` nothing may be done to these processes."""

    id: int
    found: tuple[GpuProcess, ...] = ()
    free: tuple[tuple[int, int], ...] = ()
    """Free bytes of each GPU, by Slurm's index."""
    room: int | None = None
    """Bytes that the job's memory limits still leave; None without a limit."""
    refused: str = ""


class Called(msgspec.Struct, frozen=True, tag=True):
    """The answer to Call; ``error`` is empty when it succeeded."""

    id: int
    state: str = ""
    """Answer of the operation *state*: running, locked, checkpointed or failed."""
    error: str = ""
    gone: bool = False
    """There is no such process any more."""


Request: TypeAlias = Look | Call
Reply: TypeAlias = Hello | Looked | Called
