"""Events and commands of the driver path's state machine."""

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
class Inspected:
    """An inspection came back: the job's processes on its GPUs, free bytes by GPU, and a reason to leave them alone."""

    processes: tuple[GpuProcess, ...] = ()
    free: Mapping[int, int] = field(default_factory=dict)
    refused: str = ""


@dataclass(frozen=True, slots=True)
class HelperLost:
    """The helper has ended; operations under way may have happened or not."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of the job has ended."""

    pid: int


@dataclass(frozen=True, slots=True)
class Thaw:
    """The job has its lease again."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event: TypeAlias = Answered | Inspected | HelperLost | Ended | Thaw | Tick

# --- commands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operate:
    """Call the driver for a process."""

    pid: int
    operation: Operation


@dataclass(frozen=True, slots=True)
class Inspect:
    """Find the job's processes on its GPUs, and the free memory there."""


@dataclass(frozen=True, slots=True)
class Restart:
    """End the helper, which does not answer; a HelperLost must follow."""

    reason: str


Command: TypeAlias = Operate | Inspect | Restart
