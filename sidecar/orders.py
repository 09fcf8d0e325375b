"""The link between the agents and the policy service: ZeroMQ with CURVE, one msgspec struct a frame.

An agent is a DEALER whose identity is its host name; the service is a ROUTER (port 6820). An agent sends a
``Report`` at each change and every heartbeat, ``Switched`` after every yield and resume, ``Steps`` while a
multi-node job is being stopped; the service answers with orders. All are JSON (readable on the wire in tests)
with a tag and a version; an unknown tag or another version is refused and counted, never fatal.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

VERSION = 1
DEFAULT_PORT = 6820


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


class Switched(msgspec.Struct, frozen=True, tag=True):
    """One finished yield or resume of one job on one host; durations in seconds."""

    v: int
    host: str
    job: int
    restart: int
    kind: str
    """yield | resume | refused | timeout"""
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


FromAgent: TypeAlias = Report | Switched | Steps | LeaseLog


class YieldOrder(msgspec.Struct, frozen=True, tag=True):
    """Stop the job at a common boundary and move its state out."""

    v: int
    job: int
    restart: int
    timeout_s: float


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


ToAgent: TypeAlias = YieldOrder | StopAt | CommitOrder | CancelOrder | ResumeOrder | Facts
