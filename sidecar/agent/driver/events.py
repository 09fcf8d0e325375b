"""What a machine of the driver path takes in, and what it gives out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from cadenza.sidecar.agent.driver.protocol import Operation
from cadenza.sidecar.agent.leases.lease_table import GpuProcess

# --- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answered:
    """An operation on a process came back; ``state`` is the answer to the operation *state*."""

    pid: int
    operation: Operation
    state: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Seen:
    """A look came back: the job's processes on its GPUs, free bytes by GPU, and why they must be left alone."""

    found: tuple[GpuProcess, ...] = ()
    free: Mapping[int, int] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class HelperLost:
    """The helper ended or was ended: what was under way may have happened or not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of the job is no more."""

    pid: int


@dataclass(frozen=True, slots=True)
class Thaw:
    """The job has its lease again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Answered | Seen | HelperLost | Ended | Thaw | Tick

# --- commands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operate:
    """Call the driver for a process."""

    pid: int
    operation: Operation


@dataclass(frozen=True, slots=True)
class LookAt:
    """Look which of the job's processes are on its GPUs, and how much memory is free there."""


@dataclass(frozen=True, slots=True)
class Restart:
    """End the helper, which does not answer; a HelperLost must follow."""

    reason: str


Command: TypeAlias = Operate | LookAt | Restart
