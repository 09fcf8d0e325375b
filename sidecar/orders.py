"""The link between the agents and the policy service: ZeroMQ with CURVE, one msgspec struct a frame.

An agent is a DEALER whose identity is its host name; the service is a ROUTER (port 6820). An agent sends a
``Report`` at each change and every heartbeat, ``Switched`` after every yield and resume, ``Steps`` while a
multi-node job is being stopped; the service answers with orders. All are JSON (readable on the wire in tests)
with a tag and a version; an unknown tag or another version is refused and counted, never fatal.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from cadenza.policies.core.model import Pace, Use

VERSION = 1
DEFAULT_PORT = 6820


class JobTelemetry(Use, frozen=True, omit_defaults=True, kw_only=True):
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
    """What a tuned job has on one host now; CPUs as Slurm counts them."""

    cpus: float
    memory_mb: int
    """0 where only its CPUs are tuned."""
    cache_mb: int | None
    cpu_list: str
    """CPUs of the machine, as in cpuset.cpus."""
    means: str
    """cgroup v2 | cgroup v1 | affinity"""
    note: str = ""
    """Why it could not be set, if so."""


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
    """Ranks of the whole job as they say themselves; 0 before the first attach."""
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
    """Every rank here can save a checkpoint on order."""
    lost: str = ""
    """Why the job cannot go on here, if so: only a requeue helps (the driver path, see ``Switched``)."""
    saved: bool = False
    """The ranks here stand at a boundary with a complete checkpoint on the disk, for a requeue."""
    telemetry: JobTelemetry | None = None
    tuned: InForce | None = None
    """None: it has what Slurm gave it."""
    requeue_owner: str = ""
    """Who requeues the job by a signal handler of its own, such as *lightning*; we must not then."""
    pace: Pace | None = None
    """None: it has not run since it attached."""
    pack: int = 0
    """See ``JobFacts``; what the agent goes by."""


class Prefetched(msgspec.Struct, frozen=True):
    """What a host has read for a job that will come; ``bytes`` may have been in memory before."""

    job: int
    restart: int
    files: int
    bytes: int
    seconds: float
    note: str = ""
    """Why nothing was read, if so."""


class Report(msgspec.Struct, frozen=True, tag=True):
    """Everything an agent knows."""

    v: int
    host: str
    version: str
    memory_mb: int
    memory_free_mb: int
    rotating: bool
    """True while the agent takes turns by itself because the service is away."""
    leases: tuple[LeaseReport, ...]
    lacks: tuple[str, ...] = ()
    """What the settings ask for and this host cannot do, with the reason; one sentence each."""
    prefetched: tuple[Prefetched, ...] = ()
    """Of the last jobs that were to come here."""


class Switched(msgspec.Struct, frozen=True, tag=True):
    """One finished yield or resume of one job on one host; durations in seconds."""

    v: int
    host: str
    job: int
    restart: int
    kind: str
    """yield | resume | checkpoint | refused | timeout | lost (by the driver path: only a requeue helps)"""
    at_s: float
    boundary_s: float
    """Order to all local ranks at their boundary (yield); 0 for a resume."""
    copy_s: float
    """Slowest rank's copy."""
    total_s: float
    """Order to done."""
    bytes: int
    iteration_p99_s: float | None = None
    note: str = ""


class Steps(msgspec.Struct, frozen=True, tag=True):
    """Progress of a multi-node job that was told to stop: the service computes one stop step for all."""

    v: int
    host: str
    job: int
    restart: int
    highest: int
    """Before a StopAt the furthest rank's step; then less than the stop step until all have arrived, unless a
    rank here has slipped past it. With ``arrived`` and ``refused`` it makes the Progress that ``plan_stop``
    wants of each host."""
    arrived: bool
    """All local ranks stand at a boundary, at the same step ``highest``."""
    refused: str = ""


class LeaseLog(msgspec.Struct, frozen=True, tag=True):
    """A stretch of time in which a job held its GPUs on a host, sent when it ends."""

    v: int
    host: str
    job: int
    restart: int
    gpus: tuple[int, ...]
    from_s: float
    to_s: float


class Files(msgspec.Struct, frozen=True, tag=True):
    """Files that a job's processes on one host use, as the answer to FilesOrder, and then its new checkpoint.

    A directory stands for all that is under it.
    """

    v: int
    host: str
    job: int
    restart: int
    uid: int
    paths: tuple[str, ...]


FromAgent: TypeAlias = Report | Switched | Steps | LeaseLog | Files


class YieldOrder(msgspec.Struct, frozen=True, tag=True):
    """Stop the job at a common boundary and move its state out."""

    v: int
    job: int
    restart: int
    timeout_s: float


class CheckpointOrder(msgspec.Struct, frozen=True, tag=True):
    """Stop the job at a common boundary, save a checkpoint there, and stand still for a requeue. Seconds.

    Followed by StopAt and CommitOrder for a multi-node job, as a YieldOrder is. A ResumeOrder, or ``hold_s``
    without a requeue, lets the job go on.
    """

    v: int
    job: int
    restart: int
    timeout_s: float
    """Longest wait for the boundary."""
    save_s: float
    """Longest time that saving may take."""
    hold_s: float


class FilesOrder(msgspec.Struct, frozen=True, tag=True):
    """Say which files a job uses here (``Files``), now and when it has saved a checkpoint."""

    v: int
    job: int
    restart: int


class PrefetchOrder(msgspec.Struct, frozen=True, tag=True):
    """Read files into memory as the user that the job will run as; a report lists it in ``prefetched`` when done."""

    v: int
    job: int
    restart: int
    uid: int
    paths: tuple[str, ...]


class StopAt(msgspec.Struct, frozen=True, tag=True):
    """Multi-node: the stop step that the service computed."""

    v: int
    job: int
    restart: int
    step: int


class CommitOrder(msgspec.Struct, frozen=True, tag=True):
    """Multi-node: all ranks of all hosts stand at the same boundary."""

    v: int
    job: int
    restart: int


class CancelOrder(msgspec.Struct, frozen=True, tag=True):
    """Withdraw a stop that is under way."""

    v: int
    job: int
    restart: int
    reason: str


class ResumeOrder(msgspec.Struct, frozen=True, tag=True):
    """Give the job its lease as soon as its GPUs on this host are free, before any other waiting job."""

    v: int
    job: int
    restart: int


class Tune(msgspec.Struct, frozen=True, tag=True):
    """Change what a running job has on this host, until the next such order or the job's end.

    More than its allocation comes only from what no other job needs, and goes back when one does. Less makes it a
    donor: it loses what others are given of it, and nothing while nobody wants it. All zero undoes every change.
    """

    v: int
    job: int
    restart: int
    cpus: float
    """As Slurm counts them, fractions allowed; 0 leaves them to Slurm."""
    memory_mb: int = 0
    """0 leaves it to Slurm."""
    cache_mb: int | None = None
    """What the job's caches may take of its memory; None: no word."""


class JobFacts(msgspec.Struct, frozen=True):
    """What the service knows of a job and the agent needs for taking turns by itself."""

    job: int
    restart: int
    managed: bool
    weight: float
    priority: int
    user: str
    hosts: int
    suspended: bool = False
    """Suspended in Slurm, by whomever: its processes are stopped and could not take their state back. The
    service says so before it suspends; a ResumeOrder overrides it."""
    cpus: float = 0.0
    """What Slurm's books give it on this host; 0: not known."""
    memory_mb: int = 0
    """The same of memory."""
    pack: int = 0
    """Jobs with the same number above 0 may hold the same GPUs at once: the service has found that their memory fits
    there. It holds until the next word, without the service too."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of the service: the live jobs on this host; others the agent may forget."""

    v: int
    jobs: tuple[JobFacts, ...]
    slice_s: float
    share_between_users: bool
    enforce: bool
    """False in observe-only: the agent gives every lease at once and displaces nobody, except for a job that
    did not opt in."""
    min_run_s: float = 5.0
    """Least time that a job keeps a lease it was given, except for a higher priority or an exclusive job."""


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
