"""The jobs' messages as typed structs; every field of a peer is checked here before the agent acts on it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec

from cadenza.policies.core.text import printable
from cadenza.sidecar.bounds import (
    MAX_GPUS,
    Amount,
    Bytes,
    Count,
    Gpus,
    JobId,
    Megabytes,
    Name,
    Number,
    RankStep,
    Restart,
    Seconds,
    Step,
    Text,
    Uid,
)
from cadenza.sidecar.wire import WireError, decode

Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
MAX_RESIDENT = 64
"""Names of tensors that stay on the GPU which one message may list."""
GpuBytes: TypeAlias = Annotated[tuple[Bytes, ...], msgspec.Meta(max_length=MAX_GPUS)]
MAX_SAVERS = 64
"""Checkpoints of one order, each by a saver of its own."""
MAX_WORDS = 1000
"""Characters that are kept of a text for people."""
WORDS = frozenset({"refused", "error", "reason", "path", "resident", "no_room", "failed"})
"""Fields for people: they may hold whatever an exception or a path holds, and are made clean instead of refused."""

BATCH_STEPS = frozenset({"batch", "4294967291", "-5"})
"""Slurm's spellings of the batch step: its name, and SLURM_BATCH_SCRIPT as an unsigned or signed number."""


class Start(msgspec.Struct, frozen=True):
    """The SPANK plugin registers a job (root)."""

    job: JobId
    uid: Uid
    user: Name
    node: Name
    managed: bool
    restart: Restart = 0
    lane: Count = 0
    gpus: Gpus = ()
    hosts: Count = 1
    step: Number | Name = ""
    options: Text = ""
    cpus: Amount = 0.0
    """CPUs of Slurm's allocation on this host; 0: unknown."""
    memory_mb: Megabytes = 0
    late: bool = False
    """The job starts without its lease and asks for it by itself."""

    @property
    def batch(self) -> bool:
        """True for the batch script: the job has left this node when it ends."""
        return str(self.step) in BATCH_STEPS


class End(msgspec.Struct, frozen=True):
    """The epilog: the job has left this node (root).

    Without ``restart`` every incarnation is meant, without ``node`` every lane of the host.
    """

    job: JobId
    restart: Restart | None = None
    node: Name = ""


class Attach(msgspec.Struct, frozen=True):
    """One rank presents itself; a second attach of a rank replaces the first."""

    job: JobId
    restart: Restart = 0
    rank: Count = 0
    world_size: Ranks = 1
    local_world_size: Ranks | None = None
    state: Literal["running", "arrived", "yielded"] = "running"
    step: RankStep = 0
    gpus: Gpus = ()
    node: Name = ""
    hosts: Count = 1
    requeue_owner: Name = ""
    """Other software that requeues this job by a signal handler, such as *lightning*."""
    spills: bool = False
    """The rank has a directory on a disk for its state."""
    again: bool = False
    """The rank has been training before: it does not stand still for this answer, as it does at its start."""
    together: bool = False
    """The rank can stand with its state back until the others have theirs."""

    @property
    def in_step(self) -> bool:
        """True if other ranks may already be in a collective with it, so that it must not stop alone."""
        return self.again and self.state != "yielded" and self.world_size > 1


class Ask(msgspec.Struct, frozen=True):
    """A process of a job asks for the job's lease, which it needs before it uses a GPU."""

    job: JobId
    restart: Restart = 0


class RequeuedBy(msgspec.Struct, frozen=True):
    """Other software requeues the job, as the rank noticed after it attached; "" takes that back."""

    owner: Name = ""


class Arrived(msgspec.Struct, frozen=True):
    """The rank stands at boundary ``step``; ``bytes`` is the host memory its state would take."""

    order: Step
    step: RankStep
    bytes: Bytes = 0
    held_bytes: GpuBytes = ()
    """Memory that torch holds on each GPU, its allocator's cache included, by the device's index in the process."""
    stays_bytes: GpuBytes = ()
    """The part of it that will stay there."""
    refused: Text = ""


class Yielded(msgspec.Struct, frozen=True):
    """The rank's state is in host memory; with ``error`` the move failed and the rank runs on.

    With ``no_room`` it could not be brought back, because the GPU is too full; with ``failed``, because the GPU failed.
    """

    copy_s: Seconds = 0.0
    order: Step = 0
    bytes: Bytes = 0
    left: Bytes = 0
    """Device memory that torch keeps in this process."""
    survey_s: Seconds = 0.0
    """Time in which the state was looked at, apart from its copy."""
    needed_bytes: GpuBytes = ()
    """Memory that torch takes of each GPU to go on, by the device's index in the process; also where it peaks later."""
    regrown_bytes: GpuBytes = ()
    """Memory that NCCL takes there as well, which the suspend of its communicators freed."""
    resident: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_RESIDENT)] = ()
    error: Text = ""
    no_room: Text = ""
    failed: Text = ""


class Resumed(msgspec.Struct, frozen=True):
    """The rank has its state back; ``standing``: it waits for the others at its boundary."""

    copy_s: Seconds = 0.0
    order: Step = 0
    standing: bool = False


class Checkpointed(msgspec.Struct, frozen=True):
    """The rank's part of a complete checkpoint is on disk; with ``error`` there is none and the rank runs on."""

    order: Step
    step: RankStep
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    paths: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_SAVERS)] = ()
    """Absolute, one of each saver."""
    lost_s: Seconds = 0.0
    """Training since then that the restart repeats."""
    error: Text = ""

    @property
    def failure(self) -> str:
        """Reason why no checkpoint can be relied on; a rank that names no place, or an empty one, has saved nothing."""
        if self.error or (self.paths and all(self.paths)):
            return self.error
        return "it did not say where"


class Restored(msgspec.Struct, frozen=True):
    """The rank goes on from a checkpoint: the one that its job was moved with, or a later one."""

    step: Step
    path: Text = ""


class Unrestored(msgspec.Struct, frozen=True):
    """The rank trains without what its job was moved with."""

    reason: Text = ""


class Unready(msgspec.Struct, frozen=True):
    """Why the rank cannot save a checkpoint although it has savers, a predicate's sentence; "" if it can."""

    reason: Text = ""


class Spilled(msgspec.Struct, frozen=True):
    """The rank's state has left host memory for a disk; with ``error`` it is where it was."""

    order: Step
    bytes: Bytes = 0
    seconds: Seconds = 0.0
    error: Text = ""


class Detach(msgspec.Struct, frozen=True):
    """The rank will not stop any more."""

    reason: Text = ""


Message: TypeAlias = (
    Start
    | End
    | Ask
    | Attach
    | Arrived
    | Yielded
    | Resumed
    | Checkpointed
    | Restored
    | Unrestored
    | Unready
    | Spilled
    | Detach
    | RequeuedBy
)

KINDS: dict[str, type[Message]] = {
    re.sub(r"(?<!^)([A-Z])", r"_\1", kind.__name__).lower(): kind for kind in get_args(Message)
}
"""A message's class by its ``type``: ``requeued_by`` is RequeuedBy."""


def parse(packet: bytes) -> Message:
    """Return the typed message of a packet; raise WireError, for whatever the packet holds, naming the wrong field."""
    fields = decode(packet)
    kind = fields["type"]
    if kind not in KINDS:
        raise WireError(f"unknown message type {printable(kind, 40)!r}; this agent knows {', '.join(KINDS)}")
    try:
        return msgspec.convert(_with_clean_words(fields), KINDS[kind])
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for a surrogate where no text belongs
        raise WireError(f"{kind}: {printable(str(error))}") from None


def _with_clean_words(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's fields, those for people as clean lines."""
    clean = dict(fields)
    for name in WORDS & clean.keys():
        value = clean[name]
        if isinstance(value, str):
            clean[name] = printable(value, MAX_WORDS)
        elif isinstance(value, list):
            clean[name] = [printable(one, MAX_WORDS) if isinstance(one, str) else one for one in value]
    return clean
