"""The link between the agents and the policy service: ZeroMQ with CURVE, one msgspec struct a frame.

An agent is a DEALER whose identity is its host name; the service is a ROUTER (port 6820). An agent sends a
``Report`` at each change and every heartbeat, ``Switched`` after every yield and resume, ``Steps`` while a
multi-node job is being stopped; the service answers with orders. All are JSON (readable on the wire in tests)
with a tag and a version; an unknown tag or another version is refused and counted, never fatal.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cadenza.policies.core.model import JobUsage, StepRate

VERSION = 1


class JobTelemetry(JobUsage, frozen=True, omit_defaults=True, kw_only=True):
    """Measurements of one job on one host; None or 0 for an unknown value.

    Rates and shares cover the last ``window_s`` seconds. Iteration times cover the run since the job attached, for its
    slowest rank here, within 6 %. Its processes are those that the agent knows and all their descendants.
    """

    window_s: float
    iterations: int = 0
    """Iterations of the furthest rank within the window."""
    iteration_p50_s: float | None = None
    processes: int = 0
    write_mb_s: float | None = None
    """Written to storage; ``read_mb_s`` is read from it (proc_pid_io(5): read_bytes, write_bytes)."""
    memory_kind: str = ""
    """Kind of ``memory_low_mb`` and ``memory_peak_mb``: gpu (torch's allocator) or host (resident set)."""


class InForce(msgspec.Struct, frozen=True):
    """Resources of a tuned job on one host; CPUs as Slurm counts them."""

    cpus: float
    memory_mb: int
    """0 if only its CPUs are tuned."""
    cache_mb: int | None
    cpu_list: str
    """CPUs of the machine, as in cpuset.cpus."""
    means: str
    """cgroup v2 | cgroup v1 | affinity"""
    note: str = ""
    """Reason for which it could not be set; empty if it was."""


class LeaseReport(msgspec.Struct, frozen=True):
    """One job on one host. Times in seconds."""

    job: int
    restart: int
    uid: int
    node: str
    gpus: tuple[int, ...]
    state: str
    """waiting | held | stopping | yielded"""
    managed: bool
    vtime_s: float
    held_s: float
    since_s: float
    """Epoch time of the last state change."""
    ranks: int
    """Ranks attached on this host."""
    world_size: int
    """Ranks of the whole job by their own account; 0 before the first attach."""
    hosts: int
    """Hosts of the job's allocation."""
    ready: bool
    why_not_ready: str = ""
    step: int = 0
    iteration_s: float | None = None
    iteration_p99_s: float | None = None
    note: str = ""
    """Last refusal or time-out, for ``cadenza why``."""
    checkpoints: bool = False
    """True if every rank here can save a checkpoint on order."""
    lost: str = ""
    """Reason for which the job cannot go on here, so that only a requeue helps (the driver path, see ``Switched``)."""
    saved: bool = False
    """True if the ranks here wait at a boundary with a complete checkpoint on the disk, for a requeue."""
    telemetry: JobTelemetry | None = None
    tuned: InForce | None = None
    """None: the job has the resources of its allocation."""
    requeue_owner: str = ""
    """Framework that requeues the job by its own signal handler, such as *lightning*; then the service must not."""
    pace: StepRate | None = None
    """None: it has not run since it attached."""
    pack: int = 0
    """The pack that the agent acts on, see ``JobFacts``."""


class Prefetched(msgspec.Struct, frozen=True):
    """Files that a host has read for a job that will come; some of the ``bytes`` may have been in memory before."""

    job: int
    restart: int
    files: int
    bytes: int
    seconds: float
    note: str = ""
    """Reason for which nothing was read; empty otherwise."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """The whole state of an agent."""

    v: int
    host: str
    version: str
    memory_mb: int
    memory_free_mb: int
    rotating: bool
    """True while the agent takes turns by itself because the service is away."""
    leases: tuple[LeaseReport, ...]
    lacks: tuple[str, ...] = ()
    """Settings that this host cannot fulfill, each as a sentence with the reason."""
    prefetched: tuple[Prefetched, ...] = ()
    """Results for the last jobs that were expected here."""


class JobMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages about one job on one host."""

    v: int
    host: str
    job: int
    restart: int


class Switched(JobMessage, frozen=True):
    """One finished yield or resume of one job on one host; durations in seconds."""

    kind: str
    """yield | resume | checkpoint | refused | timeout | lost (by the driver path: only a requeue helps)"""
    at_s: float
    boundary_s: float
    """Time from the order until all local ranks are at their boundary (yield); 0 for a resume."""
    copy_s: float
    """Copy time of the slowest rank."""
    total_s: float
    """Time from the order to its end."""
    bytes: int
    iteration_p99_s: float | None = None
    note: str = ""


class Steps(JobMessage, frozen=True):
    """Progress of a multi-node job towards a stop; the service computes one stop step for all hosts."""

    highest: int
    """Before a StopAt the furthest rank's step; then less than the stop step until all have arrived, unless a
    rank here has slipped past it. ``plan_stop`` takes it, ``arrived`` and ``refused`` as each host's Progress."""
    arrived: bool
    """True if all local ranks wait at a boundary, at the same step ``highest``."""
    refused: str = ""


class LeaseLog(JobMessage, frozen=True):
    """A period in which a job held its GPUs on a host, sent when it ends."""

    gpus: tuple[int, ...]
    from_s: float
    to_s: float


class Files(JobMessage, frozen=True):
    """Files that a job's processes on one host use: the answer to FilesOrder, and later its new checkpoint.

    A directory stands for its whole content.
    """

    uid: int
    paths: tuple[str, ...]


FromAgent: TypeAlias = Report | Switched | Steps | LeaseLog | Files


class JobOrder(msgspec.Struct, frozen=True, tag=True):
    """Base of the orders for one job."""

    v: int
    job: int
    restart: int


class YieldOrder(JobOrder, frozen=True):
    """Stop the job at a common boundary and offload its state."""

    timeout_s: float


class CheckpointOrder(JobOrder, frozen=True):
    """Stop the job at a common boundary, save a checkpoint there, and wait for a requeue. Times in seconds.

    For a multi-node job StopAt and CommitOrder follow, as after a YieldOrder. A ResumeOrder, or ``hold_s``
    without a requeue, lets the job go on.
    """

    timeout_s: float
    """Longest wait for the boundary."""
    save_s: float
    """Longest time that saving may take."""
    hold_s: float


class FilesOrder(JobOrder, frozen=True):
    """List the files that a job uses here (``Files``), now and when it has saved a checkpoint."""


class PrefetchOrder(JobOrder, frozen=True):
    """Read files into memory as the user that the job will run as; a report lists it in ``prefetched`` when done."""

    uid: int
    paths: tuple[str, ...]


class StopAt(JobOrder, frozen=True):
    """Set the stop step of a multi-node job."""

    step: int


class CommitOrder(JobOrder, frozen=True):
    """Complete a stop: all ranks of all hosts of a multi-node job are at the same boundary."""


class CancelOrder(JobOrder, frozen=True):
    """Cancel a stop that is under way."""

    reason: str


class ResumeOrder(JobOrder, frozen=True):
    """Give the job its lease as soon as its GPUs on this host are free, before any other waiting job."""


class Tune(JobOrder, frozen=True):
    """Change a running job's resources on this host, until the next such order or the job's end.

    More than its allocation comes only from resources that no other job needs, and goes back when one does. With less
    than its allocation the job lends: it loses only the part that other jobs are given. All zero undoes every change.
    """

    cpus: float
    """As Slurm counts them, fractions allowed; 0 leaves them to Slurm."""
    memory_mb: int = 0
    """0 leaves it to Slurm."""
    cache_mb: int | None = None
    """The part of its memory that the job's caches may take; None: unchanged."""


class JobFacts(msgspec.Struct, frozen=True):
    """Facts on a job that the agent needs to take turns by itself."""

    job: int
    restart: int
    managed: bool
    weight: float
    priority: int
    user: str
    hosts: int
    suspended: bool = False
    """True if Slurm has suspended it, for any reason: its processes are stopped and could not restore their state. The
    service sends this before it suspends; a ResumeOrder overrides it."""
    cpus: float = 0.0
    """CPUs of its allocation on this host; 0: not known."""
    memory_mb: int = 0
    """Memory of its allocation on this host; 0: not known."""
    pack: int = 0
    """Jobs with the same number above 0 may hold the same GPUs at once, because their memory fits there. The pack
    lasts until the next facts, without the service too."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of the service: the live jobs on this host; the agent may forget others."""

    v: int
    jobs: tuple[JobFacts, ...]
    slice_s: float
    share_between_users: bool
    enforce: bool
    """False in observe-only: the agent gives every lease at once and displaces a job only for one that did not
    opt in."""
    min_run_s: float = 5.0
    """Least time for which a job keeps a new lease, unless a higher priority or an exclusive job takes it."""


ToAgent: TypeAlias = (
    YieldOrder
    | CheckpointOrder
    | FilesOrder
    | PrefetchOrder
    | StopAt
    | CommitOrder
    | CancelOrder
    | ResumeOrder
    | Tune
    | Facts
)
