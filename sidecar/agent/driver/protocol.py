"""Messages between the agent and its helper process: one msgspec struct a packet, over a socket pair."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from cadenza.sidecar.agent.leases.lease_table import GpuProcess

MAX_PACKET = 1 << 17

Operation: TypeAlias = Literal["state", "lock", "checkpoint", "restore", "unlock"]


class InspectCall(msgspec.Struct, frozen=True, tag=True):
    """Find the processes of a job on its GPUs, and any reason that they must not be stopped."""

    id: int
    uid: int
    gpus: tuple[int, ...]
    pids: tuple[int, ...]
    """All processes of the job."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """One call of the checkpoint API on one process, if pid and start time still match."""

    id: int
    operation: Operation
    pid: int
    start_ticks: int
    timeout_ms: int = 0
    """Time-out of a lock: the driver gives up after it, and the process runs on."""
    pairs: tuple[tuple[str, str], ...] = ()
    """GPUs of a restore: UUIDs of each GPU that the kernel driver shows, and of the one to restore it onto."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The helper's first message; with a ``problem`` of the machine the helper ends."""

    cuda: int = 0
    """Result of cuDriverGetVersion: 12080 is the API of driver 570."""
    problem: str = ""
    driver: str = ""
    """The driver's version by NVML, "" where it is not known."""


class Inspection(msgspec.Struct, frozen=True, tag=True):
    """The answer to InspectCall; with ``refused`` these processes must be left alone."""

    id: int
    processes: tuple[GpuProcess, ...] = ()
    free: tuple[tuple[int, int], ...] = ()
    """Free bytes of each GPU, by Slurm's index."""
    headroom: int | None = None
    """Bytes that the job's memory limits still leave; None without a limit."""
    refused: str = ""


class Called(msgspec.Struct, frozen=True, tag=True):
    """The answer to Call; ``error`` is empty when it succeeded."""

    id: int
    state: str = ""
    """Answer of the operation *state*: running, locked, checkpointed or failed."""
    error: str = ""
    gone: bool = False
    """The process has ended."""


Request: TypeAlias = InspectCall | Call
Reply: TypeAlias = Hello | Inspection | Called
