"""The jobs' messages as typed structs; every field of a peer is checked here before the agent acts on it."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from cadenza.sidecar.agent.errors import RefusedError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
JobId: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]
Index: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1023)]
Gpus: TypeAlias = Annotated[tuple[Index, ...], msgspec.Meta(max_length=64)]

BATCH_STEPS = frozenset({"batch", "4294967291", "-5"})
"""Slurm's spellings of the batch step: its name, and SLURM_BATCH_SCRIPT as an unsigned or signed number."""


class Start(msgspec.Struct, frozen=True):
    """The SPANK plugin registers a job (root)."""

    job: JobId
    uid: Count
    user: Text
    node: Text
    managed: bool
    restart: Count = 0
    lane: Count = 0
    gpus: Gpus = ()
    hosts: Count = 1
    step: int | Text = ""
    options: Text = ""
    cpus: Seconds = 0.0
    """CPUs of Slurm's allocation on this host; 0: unknown."""
    memory_mb: Count = 0

    @property
    def batch(self) -> bool:
        """True for the batch script: the job has left this node when it ends."""
        return str(self.step) in BATCH_STEPS


class End(msgspec.Struct, frozen=True):
    """The epilog: the job has left this node (root). Without ``restart`` every incarnation is meant."""

    job: JobId
    restart: Count | None = None


class Attach(msgspec.Struct, frozen=True):
    """One rank presents itself; a second attach of a rank replaces the first."""

    job: JobId
    restart: Count = 0
    rank: Count = 0
    world_size: Annotated[int, msgspec.Meta(ge=1)] = 1
    local_world_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    state: Literal["running", "arrived", "yielded"] = "running"
    step: Count = 0
    gpus: Gpus = ()
    node: Text = ""
    hosts: Count = 1
    requeue_owner: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Other software that requeues this job by a signal handler, such as *lightning*."""
    again: bool = False
    """The rank has been training before: it does not stand still for this answer, as it does at its start."""

    @property
    def in_step(self) -> bool:
        """True if other ranks may already be in a collective with it, so that it must not stop alone."""
        return self.again and self.state != "yielded" and self.world_size > 1


class RequeuedBy(msgspec.Struct, frozen=True):
    """Other software requeues the job, as the rank noticed after it attached; "" takes that back."""

    owner: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Arrived(msgspec.Struct, frozen=True):
    """The rank stands at boundary ``step``; ``bytes`` is the host memory its state would take."""

    order: Count
    step: Count
    bytes: Count = 0
    refused: Text = ""


class Yielded(msgspec.Struct, frozen=True):
    """The rank's state is in host memory; with ``error`` the move failed and the rank runs on."""

    copy_s: Seconds = 0.0
    order: Count = 0
    bytes: Count = 0
    resident: tuple[Text, ...] = ()
    error: Text = ""


class Resumed(msgspec.Struct, frozen=True):
    """The rank has its state back."""

    copy_s: Seconds = 0.0
    order: Count = 0


class Checkpointed(msgspec.Struct, frozen=True):
    """The rank's part of a complete checkpoint is on disk; with ``error`` there is none and the rank runs on."""

    order: Count
    step: Count
    bytes: Count = 0
    seconds: Seconds = 0.0
    path: Text = ""
    error: Text = ""


class Detach(msgspec.Struct, frozen=True):
    """The rank will not stop any more."""

    reason: Text = ""


Message: TypeAlias = Start | End | Attach | Arrived | Yielded | Resumed | Checkpointed | Detach | RequeuedBy

KINDS: dict[str, type[Message]] = {
    "start": Start,
    "end": End,
    "attach": Attach,
    "arrived": Arrived,
    "yielded": Yielded,
    "resumed": Resumed,
    "checkpointed": Checkpointed,
    "detach": Detach,
    "requeued_by": RequeuedBy,
}


def parse(packet: dict[str, Any]) -> Message:
    """Return the typed message of a decoded packet; raise RefusedError naming the wrong field."""
    kind = packet["type"]
    if kind not in KINDS:
        raise RefusedError(f"unknown message type {kind!r}; this agent knows {', '.join(KINDS)}")
    try:
        return msgspec.convert(packet, KINDS[kind])
    except msgspec.ValidationError as error:
        raise RefusedError(f"{kind}: {error}") from None
