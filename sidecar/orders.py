"""The link between the agents and the policy service: ZeroMQ with CURVE, one msgspec struct a frame.

An agent is a DEALER whose key says which host it is; the service is a ROUTER (port 6850). An agent sends a
``Report`` at each change and every heartbeat, ``Switched`` after every yield and resume, ``Steps`` while a
multi-node job is being stopped; the service answers with orders. All are JSON (readable on the wire in tests)
with a tag and a version; an unknown tag, another version or a value out of its bounds is refused and counted, never
fatal. The service answers a frame of another version with ``OtherVersion``, so that both sides can name both. All text
is clean (:mod:`cadenza.sidecar.bounds`); the side that sends makes it so with ``printable``.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from cadenza.policies.core.model import JobUsage, StepRate
from cadenza.sidecar.bounds import (
    MAX_JOBS,
    MAX_TAKEN,
    Amount,
    Bytes,
    Count,
    Gpus,
    JobId,
    Megabytes,
    Moment,
    Name,
    Number,
    Paths,
    ReceiptPaths,
    Restart,
    Seconds,
    Step,
    Text,
    Uid,
    VirtualSeconds,
)
from cadenza.sidecar.local_socket import MAX_REQUEST

MAX_TOLD = 2**20
VERSION = 1
"""Raised by a change that the other side would misread; every version has ``v`` in all of its frames."""


class JobTelemetry(JobUsage, frozen=True, omit_defaults=True, kw_only=True):
    """Measurements of one job on one host; None or 0 for an unknown value.

    Rates and shares cover the last ``window_s`` seconds. Iteration times cover the run since the job attached, for its
    slowest rank here, within 6 %. Its processes are those that the agent knows and all their descendants.
    """

    window_s: Seconds
    iterations: Step = 0
    """Iterations of the furthest rank within the window."""
    iteration_p50_s: Seconds | None = None
    processes: Count = 0
    write_mb_s: Amount | None = None
    """Written to storage; ``read_mb_s`` is read from it (proc_pid_io(5): read_bytes, write_bytes)."""
    memory_kind: Name = ""
    """Kind of ``memory_low_mb`` and ``memory_peak_mb``: gpu (torch's allocator) or host (resident set)."""


class InForce(msgspec.Struct, frozen=True):
    """Resources of a tuned job on one host; CPUs as Slurm counts them."""

    cpus: Amount
    memory_mb: Megabytes
    """0 if only its CPUs are tuned."""
    cache_mb: Megabytes | None
    cpu_list: Text
    """CPUs of the machine, as in cpuset.cpus."""
    means: Name
    """cgroup v2 | cgroup v1 | affinity"""
    note: Text = ""
    """Reason for which it could not be set; empty if it was."""


class Receipt(msgspec.Struct, frozen=True):
    """A complete checkpoint that was ordered: the job's next start has to find it, or a later one of the same job."""

    restart: Restart
    """The first start that has to find it."""
    step: Step
    paths: ReceiptPaths
    """One of each saver; empty if there are too many, or one is too long."""
    left_s: Moment = 0.0
    """Time at which the service saw it, by the service's clock; 0: not known, or the job went on since."""


class LeaseReport(msgspec.Struct, frozen=True):
    """One job on one host. Times in seconds."""

    job: JobId
    restart: Restart
    uid: Uid
    node: Name
    gpus: Gpus
    state: Name
    """waiting | held | stopping | yielded"""
    managed: bool
    vtime_s: VirtualSeconds
    held_s: Seconds
    since_s: Moment
    """Epoch time of the last state change."""
    ranks: Count
    """Ranks attached on this host."""
    world_size: Count
    """Ranks of the whole job by their own account; 0 before the first attach."""
    hosts: Count
    """Hosts of the job's allocation."""
    ready: bool
    why_not_ready: Text = ""
    step: Step = 0
    iteration_s: Seconds | None = None
    iteration_p99_s: Seconds | None = None
    note: Text = ""
    """Last refusal or time-out, for ``cadenza why``."""
    checkpoints: bool = False
    """True if every rank here can save a checkpoint on order."""
    saves_away: bool = False
    """True if every rank here can also save one while its state is in host memory."""
    saving: bool = False
    """True while the ranks of a yielded job here save one, until the requeue, or move their state to a disk."""
    stalls: bool = False
    """True while the ranks save an ordered checkpoint that is overdue, and for a while after that was given up."""
    unready: Text = ""
    """Why a rank that has savers can save no checkpoint, a sentence."""
    file_system: Name = ""
    """File system that the job's last ordered checkpoint is on; "" if it is not known."""
    receipt: Receipt | None = None
    """The checkpoint with which the job waits for a requeue."""
    lost_s: Seconds = 0.0
    """Training that the start after a move would repeat: since that checkpoint, or since the script's own last one."""
    unrestored: Text = ""
    """Reason, a sentence, for which the job must not be moved again: it trained without what it was moved with."""
    lost: Text = ""
    """Reason for which the job cannot go on here, so that only a requeue helps (the driver path, see ``Switched``)."""
    saved: bool = False
    """True if the ranks here wait at a boundary with a complete checkpoint on the disk, for a requeue."""
    telemetry: JobTelemetry | None = None
    tuned: InForce | None = None
    """None: the job has the resources of its allocation."""
    requeue_owner: Name = ""
    """Framework that requeues the job by its own signal handler, such as *lightning*; then the service must not."""
    pace: StepRate | None = None
    """None: it has not run since it attached."""
    pack: Step = 0
    """The pack that the agent acts on, see ``JobFacts``."""
    refusals: Count = 0
    """Stops in a row that its ranks refused, slept through or only claimed to follow."""
    unyielding: Text = ""
    """Why it is not ``ready`` although its ranks can stop at a boundary, for a checkpoint: its stops have failed, or
    no job that waits could use what it would free; empty otherwise."""
    shown: Name = ""
    """State of its processes as the host shows it: running | frozen (by Slurm's suspend) | gone; "" not looked at."""
    amiss: Text = ""
    """Difference between ``shown`` and Slurm's word that has lasted for ``AMISS_S``; empty if there is none."""
    late: bool = False
    """The job has started without its lease and has not asked for it yet."""
    early: Text = ""
    """The process that was seen on a GPU before the job had asked for its lease; empty if there was none."""
    no_room: Text = ""
    """Reason for which it gets no lease here now: who has the GPU or host memory that it needs; empty otherwise."""


class Prefetched(msgspec.Struct, frozen=True):
    """Files that a host has read for a job that will come; some of the ``bytes`` may have been in memory before."""

    job: JobId
    restart: Restart
    files: Count
    bytes: Bytes
    seconds: Seconds
    note: Text = ""
    """Reason for which nothing was read; empty otherwise."""


class AbsentJob(msgspec.Struct, frozen=True):
    """A job that the service's facts have on a host where no step of it is left."""

    job: JobId
    restart: Restart


class Report(msgspec.Struct, frozen=True, tag=True):
    """The whole state of an agent."""

    v: Count
    host: Name
    version: Name
    memory_mb: Megabytes
    memory_free_mb: Megabytes
    rotating: bool
    """True while the agent takes turns by itself because the service is away."""
    at_s: Moment
    """Time of the report by the host's own clock, by which all of its moments are; the service sets them right."""
    leases: Annotated[tuple[LeaseReport, ...], Meta(max_length=MAX_JOBS)]
    lacks: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Settings that this host cannot fulfill, each as a sentence with the reason."""
    prefetched: Annotated[tuple[Prefetched, ...], Meta(max_length=1024)] = ()
    """Results for the last jobs that were expected here."""
    taken: Annotated[tuple[Text, ...], Meta(max_length=MAX_TAKEN)] = ()
    """Processes that use GPUs without a lease, each as a sentence: their GPUs go to no job until they end."""
    absent: Annotated[tuple[AbsentJob, ...], Meta(max_length=MAX_JOBS)] = ()
    """Jobs of the facts that have had no step here for some time."""
    faults: Annotated[tuple[Text, ...], Meta(max_length=64)] = ()
    """Faults of this host that it goes on with, each as a sentence."""


class JobMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of the messages about one job on one host."""

    v: Count
    host: Name
    job: JobId
    restart: Restart


class Switched(JobMessage, frozen=True):
    """One finished yield or resume of one job on one host; durations in seconds."""

    kind: Name
    """yield | resume | checkpoint | refused | timeout | lost (by the driver path: only a requeue helps)"""
    at_s: Moment
    boundary_s: Seconds
    """Time from the order until all local ranks are at their boundary (yield); 0 for a resume."""
    copy_s: Seconds
    """Copy time of the slowest rank."""
    total_s: Seconds
    """Time from the order to its end."""
    bytes: Bytes
    iteration_p99_s: Seconds | None = None
    note: Text = ""


class Steps(JobMessage, frozen=True):
    """Progress of a multi-node job towards a stop; the service computes one stop step for all hosts."""

    highest: Step
    """Before a StopAt the furthest rank's step; then less than the stop step until all have arrived, unless a
    rank here has slipped past it. ``plan_stop`` takes it, ``arrived`` and ``refused`` as each host's Progress."""
    arrived: bool
    """True if all local ranks wait at a boundary, at the same step ``highest``."""
    refused: Text = ""


class LeaseLog(JobMessage, frozen=True):
    """A period in which a job held its GPUs on a host, sent when it ends."""

    gpus: Gpus
    from_s: Moment
    to_s: Moment


class Files(JobMessage, frozen=True):
    """Files that a job's processes on one host use: the answer to FilesOrder, and later its new checkpoint.

    A directory stands for its whole content. They are read as the user that Slurm names.
    """

    paths: Paths


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A question of a user of this host; the service answers with ``Told``."""

    v: Count
    host: Name
    id: Step
    uid: Uid
    """The user, as the host's kernel names them."""
    question: Annotated[bytes, Meta(max_length=MAX_REQUEST)]


FromAgent: TypeAlias = Report | Switched | Steps | LeaseLog | Files | Ask


class JobOrder(msgspec.Struct, frozen=True, tag=True):
    """Base of the orders for one job."""

    v: Count
    job: JobId
    restart: Restart


class YieldOrder(JobOrder, frozen=True):
    """Stop the job at a common boundary and offload its state."""

    timeout_s: Seconds


class CheckpointOrder(JobOrder, frozen=True):
    """Stop the job at a common boundary, save a checkpoint there, and wait for a requeue. Times in seconds.

    For a multi-node job StopAt and CommitOrder follow, as after a YieldOrder. A ResumeOrder, or ``hold_s``
    without a requeue, lets the job go on. A job that has yielded saves without its GPUs where it waits: no other
    order follows.
    """

    timeout_s: Seconds
    """Longest wait for the boundary."""
    save_s: Seconds
    """Longest time that saving may take."""
    hold_s: Seconds
    away: bool = False
    """The job has yielded; where it has its GPUs again by now, it is not stopped for this order."""
    goal: Text = ""
    """Purpose for the job's own output: a predicate of what it does once it has saved."""


class FilesOrder(JobOrder, frozen=True):
    """List the files that a job uses here (``Files``), now and when it has saved a checkpoint."""


class PrefetchOrder(JobOrder, frozen=True):
    """Read files into memory as the user that the job will run as; a report lists it in ``prefetched`` when done."""

    uid: Uid
    paths: Paths


class StopAt(JobOrder, frozen=True):
    """Set the stop step of a multi-node job."""

    step: Step


class CommitOrder(JobOrder, frozen=True):
    """Complete a stop: all ranks of all hosts of a multi-node job are at the same boundary."""


class CancelOrder(JobOrder, frozen=True):
    """Cancel a stop that is under way."""

    reason: Text


class ResumeOrder(JobOrder, frozen=True):
    """Give the job its lease as soon as its GPUs on this host are free, before any other waiting job."""


class Tune(JobOrder, frozen=True):
    """Change a running job's resources on this host, until the next such order or the job's end.

    More than its allocation comes only from resources that no other job needs, and goes back when one does. With less
    than its allocation the job lends: it loses only the part that other jobs are given. All zero undoes every change.
    """

    cpus: Amount
    """As Slurm counts them, fractions allowed; 0 leaves them to Slurm."""
    memory_mb: Megabytes = 0
    """0 leaves it to Slurm."""
    cache_mb: Megabytes | None = None
    """The part of its memory that the job's caches may take; None: unchanged."""


class JobFacts(msgspec.Struct, frozen=True):
    """Facts on a job that the agent needs to take turns by itself."""

    job: JobId
    restart: Restart
    managed: bool
    weight: Amount
    priority: Number
    user: Name
    hosts: Count
    suspended: bool = False
    """True if Slurm has suspended it, for any reason: its processes are stopped and could not restore their state. The
    service sends this before it suspends; a ResumeOrder overrides it."""
    cpus: Amount = 0.0
    """CPUs of its allocation on this host; 0: not known."""
    memory_mb: Megabytes = 0
    """Memory of its allocation on this host; 0: not known."""
    pack: Step = 0
    """Jobs with the same number above 0 may hold the same GPUs at once, because their memory fits there. The pack
    lasts until the next facts, without the service too."""
    requeueable: bool = True
    receipt: Receipt | None = None
    """The checkpoint that it has to find; None: there is none."""
    unrestored: Text = ""
    """As in its last report, or in that of an earlier start."""
    new: bool = False
    """True if it is too new for the service's last look at Slurm: its receipt is not known yet."""
    gang: bool = False
    """True if the service gives it its first lease: of two such jobs each host by itself could choose another one, and
    then neither could start."""


class Facts(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of the service: the live jobs on this host; the agent may forget others."""

    v: Count
    jobs: Annotated[tuple[JobFacts, ...], Meta(max_length=MAX_JOBS)]
    slice_s: Seconds
    share_between_users: bool
    enforce: bool
    """False in observe-only: the agent gives every lease at once and displaces a job only for one that did not
    opt in."""
    min_run_s: Seconds = 5.0
    """Least time for which a job keeps a new lease, unless a higher priority or an exclusive job takes it."""
    yield_timeout_s: Seconds = 60.0
    """Longest wait for a job to reach its boundary when the agent itself stops it."""
    suspends: bool = False
    """True if the service suspends each job in Slurm that has yielded here: until then its GPUs go to no other."""
    at_s: Moment = 0.0
    """Time at which the service sent this, by its own clock."""
    memory_mb: Megabytes = 0
    """Memory of all jobs here together where each lane has the host's whole; 0: each has a part, which Slurm guards."""


class Told(msgspec.Struct, frozen=True, tag=True):
    """The answer to an ``Ask``: JSON, compressed by zlib, for the user alone."""

    v: Count
    id: Step
    answer: Annotated[bytes, Meta(max_length=MAX_TOLD)]


class OtherVersion(msgspec.Struct, frozen=True, tag=True):
    """The service's answer to a frame of another version, which can read no more of this than ``v``."""

    v: Count


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
    | Told
)
