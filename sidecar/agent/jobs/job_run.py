"""A job on this host beyond its lease: its ranks and their connections, the stop or resume under way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from cadenza.policies.core.model import MAX_REFUSALS, JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.ipc.messages import Attach
from cadenza.sidecar.agent.ipc.pages import Page, Telemetry
from cadenza.sidecar.agent.ipc.slurm_steps import Shown
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs.step_rate import StepRateMeter
from cadenza.sidecar.agent.jobs.stop_states import CheckpointStop, Stop
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.bounds import MAX_NUMBER, MAX_RECEIPT_PATH, MAX_RECEIPT_PATHS
from cadenza.sidecar.stop_step import Progress

SAVE_POINT_STEPS = 100
"""Steps in whose time a save point must come after an order. One step is the usual; a hundred also cover the micro-
batches of a large accumulation and most evaluations, and the job loses nothing by it, because it trains on."""
OWN_SAVES = 1.25
"""The same for a job that can be saved only at its script's own saves, in their usual distance."""
STALLED_S = 60.0
"""Time for which an overdue save is reported after it has ended."""
SAVE_POINT_MAX_S = 900.0
"""Longest of these times, in seconds, because another job may wait for the GPUs."""


@dataclass
class Rank:
    """One attached process. A lost connection leaves it here until the process ends or attaches again."""

    session: Session | None
    pid: int
    hello: Attach
    page: Page
    out: bool = False
    """Its state is in host memory, or it was asked to move it there and wait."""
    arrived: int | None = None
    """Boundary at which it stands."""
    bytes: int = 0
    moved: int = 0
    """Bytes of state that its last yield moved out."""
    left: int = 0
    """Bytes that torch kept on the GPU after it."""
    held: tuple[int, ...] = ()
    """Bytes that torch held on each of its devices when it last stood at a boundary, by their indices there."""
    stays: tuple[int, ...] = ()
    """The part of them that was to stay."""
    needed: tuple[int, ...] = ()
    """Bytes that torch needs there to go on after its last yield; ``regrown``: those that NCCL takes as well."""
    regrown: tuple[int, ...] = ()
    beyond: Mapping[int, int] | None = None
    """Bytes on each GPU that were not torch's, as measured at its last stop; None if they were not."""
    refused: str = ""
    failed: str = ""
    """Reason why its state cannot come back to its GPU, which has failed; "" once it is back."""
    requeue_owner: str = ""
    """Other software that requeues the job, as this rank reports."""
    unready: str = ""
    """Why it can save no checkpoint although it has savers; "" if it can."""
    on_disk: bool = False
    """Its state went to a file while it was out, because the host's memory was short, or could not."""

    @property
    def progress(self) -> Progress:
        """Progress of the rank, for :func:`plan_stop`."""
        if self.arrived is not None:
            return Progress(self.arrived, arrived=True, refused=self.refused)
        return Progress(self.page.step, arriving=self.page.state == wire.STATE_ARRIVED)

    def expected_here(self, hosts: int) -> int:
        """Return the number of ranks on this host, as this one reports it."""
        return self.hello.local_world_size or -(-self.hello.world_size // max(hosts, 1))


@dataclass
class Waiter:
    """A SPANK plugin that waits for the first lease; monotonic times in seconds."""

    session: Session
    deadline: float
    next_reply_at: float


@dataclass
class Resume:
    """A resume under way; monotonic time in seconds."""

    began: float
    pending: set[int]
    """Pids of ranks that have not answered yet."""
    copy_s: float = 0.0
    together: bool = False
    """Ranks that have their state back stand until all have."""
    standing: dict[int, int] = field(default_factory=dict)
    """Order that each of them followed, by pid."""
    refused: str = ""
    """Cause for which a rank's state cannot come back, as a stop's ``origin``; otherwise empty."""

    def leave(self, pid: int) -> None:
        """Forget a rank."""
        self.pending.discard(pid)
        self.standing.pop(pid, None)


@dataclass
class Eviction:
    """The way of a waiting job's state out of host memory that is short; monotonic time in seconds."""

    reason: str
    began: float
    spilling: set[int]
    """Pids of ranks whose state goes to a disk; without any, the job saves a checkpoint and is requeued."""


@dataclass
class JobRun:
    """One incarnation of a job on this host."""

    key: JobKey
    ranks: dict[int, Rank] = field(default_factory=dict)
    """By pid: a second process that calls itself rank 0 must be stopped as well as the first."""
    waiters: list[Waiter] = field(default_factory=list)
    stop: Stop | None = None
    resume: Resume | None = None
    detached: str | None = None
    """Reason why its ranks cannot be stopped any more, after one detached."""
    note: str = ""
    """Last refusal or time-out, for ``cadenza why``."""
    fault: str = ""
    """Reason for which the agent leaves it alone, after one of its steps failed; otherwise empty."""
    retry_at: float = 0.0
    """Monotonic time before which it is not asked to yield again, after a stop that failed."""
    save_retry_at: float = 0.0
    """The same for checkpoints."""
    divided: str = ""
    """Reason why its GPUs are not shared: Slurm's indices are no GPUs (MIG); otherwise empty."""
    preferred_until: float = 0.0
    """Monotonic time until which free GPUs go to this job before any other."""
    empty_since: float | None = None
    """Monotonic time at which its last process ended."""
    batch_ended: bool = False
    listed: bool = False
    """The service has named this job in its Facts."""
    freezable: bool = False
    """The driver path may stop it if its ranks cannot."""
    driver: str | None = None
    """Work of the driver path on it; None if there is none, or if all of the job is in host memory."""
    lost: str = ""
    """Reason why the driver path cannot bring it back; otherwise empty."""
    step_rate: StepRateMeter = field(default_factory=StepRateMeter)
    stuck: str = ""
    """Reason why its other ranks wait in vain for one that cannot use its GPU; otherwise empty."""
    no_room: str = ""
    """Reason why the driver sees no room for it on its GPUs; otherwise empty."""
    no_memory: str = "the host's memory is being looked at"
    """Reason why it must wait for host memory before its first lease, where the agent guards that; otherwise empty."""
    memory_peak_mb: int = 0
    """Most host memory that it was seen to have or to need at once, its GPU state included."""
    memory_looks: int = 0
    """Looks at its memory while it had its lease."""
    eviction: Eviction | None = None
    spilled_from_mb: int = 0
    """Host memory that it had when its state was to go to a disk, while that is compared with what it has now; or 0."""
    memory_stays: bool = False
    """It said that its state is on a disk, and had no less memory for it."""
    no_room_until: float = 0.0
    """Monotonic time until which that reason counts."""
    no_room_beside: frozenset[JobKey] = frozenset()
    """Holders of its GPUs with which it would have no room; the reason ends with them. Empty: it is another one."""
    grant_at: float | None = None
    """Monotonic time at which its lease was ready but for a look at its GPUs' memory."""
    short_at: float | None = None
    """Monotonic time at which such a look found too little."""
    refusals: int = 0
    """Stops in a row that its ranks refused, slept through or only claimed to follow."""
    kept: dict[int, int] = field(default_factory=dict)
    """Memory of each GPU that it keeps while it is out, or would keep, as of ``kept_at``; empty until measured."""
    kept_at: float = float("-inf")
    useless: str = ""
    """Reason why no job that waits for its GPUs would fit in with that: then it is not asked to yield; else empty."""
    judged: tuple[float, int] | None = None
    """The look at the GPUs and the state of the leases by which that was found."""
    out_at: float = float("-inf")
    """Monotonic time at which its ranks had moved out for its last yield."""
    seen: tuple[float, Shown] | None = None
    """Monotonic time and result of the last look at its processes."""
    saved_at: float | None = None
    """Monotonic time of its last complete checkpoint that was ordered."""
    amiss_since: float | None = None
    """Monotonic time since which its processes contradict Slurm's word."""
    followed: bool = False
    """Another host reads its files ahead, because the job will move there."""
    told: bool = False
    """The service has said whether the job has to find a checkpoint."""
    to_find: orders.Receipt | None = None
    """The checkpoint that it has to find."""
    arrived: set[int] = field(default_factory=set)
    """Numbers of the ranks that went on from it, or from a later one."""
    unrestored: str = ""
    """Reason, a sentence, for which it must not be moved again: it trained without that checkpoint; otherwise empty."""
    file_system: str = ""
    """File system of its last ordered checkpoint; empty if it is not known."""
    stalled_at: float | None = None
    """Monotonic time at which a save of it was last seen to be overdue."""

    @property
    def connected(self) -> list[Rank]:
        """The ranks with a connection."""
        return [rank for rank in self.ranks.values() if rank.session is not None]

    @property
    def pages(self) -> dict[int, Page]:
        """Each rank's page, by pid."""
        return {pid: rank.page for pid, rank in self.ranks.items()}

    @property
    def in_step(self) -> bool:
        """True unless several processes attached as the same rank: these train apart, and stop each by itself."""
        return len({rank.hello.rank for rank in self.ranks.values()}) == len(self.ranks)

    @property
    def can_checkpoint(self) -> bool:
        """True if every rank here can save a checkpoint on order, and its job may be moved with it."""
        return (
            bool(self.ranks)
            and self.in_step
            and not self.unrestored
            and all(rank.page.saves for rank in self.ranks.values())
        )

    @property
    def unready(self) -> str:
        """Why a rank here that has savers can save no checkpoint; empty if none says so."""
        return next((rank.unready for rank in self.ranks.values() if rank.unready), "")

    @property
    def can_checkpoint_away(self) -> bool:
        """True if every rank here can save a checkpoint while its state is in host memory."""
        able = bool(self.ranks) and self.in_step and not self.unrestored
        return able and all(rank.page.saves_away for rank in self.ranks.values())

    @property
    def save_point_s(self) -> float:
        """Longest time in which a save point must come, by the job's usual times: see ``SAVE_POINT_STEPS``."""
        own = max((rank.page.save_every for rank in self.ranks.values()), default=0)
        steps = max(SAVE_POINT_STEPS, OWN_SAVES * own)
        return min(steps * (self.telemetry.iteration_s or 0.0), SAVE_POINT_MAX_S)

    @property
    def passed(self) -> str:
        """Why a rank passed its last boundary without saving the checkpoint that was ordered, in words; else ""."""
        stop = self.stop
        if not isinstance(stop, CheckpointStop) or not stop.step:
            return ""
        return next((rank.page.passed for rank in self.ranks.values() if rank.page.step >= stop.step), "")

    @property
    def checkpointed(self) -> bool:
        """True while the ranks here stand still after a complete checkpoint, ready for a requeue."""
        return isinstance(self.stop, CheckpointStop) and self.stop.saved_at is not None

    @property
    def receipt(self) -> orders.Receipt | None:
        """The checkpoint with which the ranks stand, for the start that a requeue makes; paths only if all fit."""
        stop = self.stop
        if not isinstance(stop, CheckpointStop) or stop.saved_at is None:
            return None
        nameable = len(stop.paths) <= MAX_RECEIPT_PATHS and all(len(path) <= MAX_RECEIPT_PATH for path in stop.paths)
        return orders.Receipt(self.key.restart + 1, stop.saved_step, stop.paths if nameable else ())

    @property
    def lost_s(self) -> float:
        """Training that a move would repeat: since the checkpoint with which the ranks stand, or would stand now."""
        stop = self.stop
        if isinstance(stop, CheckpointStop) and stop.saved_at is not None:
            return stop.lost_s
        return max((rank.page.lost_s for rank in self.ranks.values()), default=0.0)

    def stalls(self, now: float) -> bool:
        """Return True while a save is overdue, and for a while after it was given up."""
        if isinstance(self.stop, CheckpointStop) and self.stop.overdue(now):
            self.stalled_at = now
        return self.stalled_at is not None and now - self.stalled_at < STALLED_S

    @property
    def failed(self) -> str:
        """Reason why it cannot go on with GPUs of which one fails, once its checkpoint is on the disk; else "".

        It cannot either if some ranks have their state back. One that is evicted from host memory goes the same way.
        """
        if self.stuck or not self.checkpointed:
            return self.stuck
        if self.eviction is not None:
            return self.eviction.reason
        return next((rank.failed for rank in self.ranks.values() if rank.failed), "")

    @property
    def left_bytes(self) -> int:
        """GPU memory that torch kept in all ranks after their last yield."""
        return min(sum(rank.left for rank in self.ranks.values()), MAX_NUMBER)

    @property
    def gpu_bytes(self) -> int:
        """GPU memory that the ranks need to go on after their last yield: their peak, or at least their state.

        0 for ranks without a GPU.
        """
        needed = 0
        for rank in self.ranks.values():
            record = rank.page.record()
            if record is not None and record.memory_kind == wire.MEMORY_GPU:
                needed += max(rank.moved, record.memory_peak - rank.left)
        return min(needed, MAX_NUMBER)

    def may_freeze(self, lease: Lease) -> bool:
        """Return True if the driver path may take over: it frees the GPUs of holders only."""
        return self.freezable and lease.occupying

    def all_out_here(self, lease: Lease) -> bool:
        """Return True if the job has no ranks on other hosts, and none that runs here."""
        return lease.hosts == 1 and all(rank.out for rank in self.ranks.values())

    def may_resume_together(self, lease: Lease) -> bool:
        """Return True if ranks that have their state back can wait for the others, and must: one alone need not."""
        able = all(rank.hello.together for rank in self.ranks.values())
        return able and len(self.ranks) > 1 and self.in_step and self.all_out_here(lease)

    def runs_unleased(self, lease: Lease) -> bool:
        """Return True if ranks train although the job has no lease; see :class:`UnleasedStop`."""
        return not lease.occupying and not lease.frozen and any(not rank.out for rank in self.ranks.values())

    @property
    def world_size(self) -> int:
        """Ranks of the whole job as the ranks report; 0 before the first attach."""
        return max((rank.hello.world_size for rank in self.ranks.values()), default=0)

    @property
    def requeue_owner(self) -> str:
        """Other software that requeues the job, as the ranks report; empty if there is none."""
        return next((rank.requeue_owner for rank in self.ranks.values() if rank.requeue_owner), "")

    def not_ready_reason(self, lease: Lease, now: float) -> str | None:
        """Return the reason why the job cannot be asked to yield at the monotonic time ``now``; None if it can."""
        return self.unable_reason(lease) or self.unyielding_reason(now) or None

    def unsavable_reason(self, lease: Lease, now: float) -> str | None:
        """Return the reason why the job cannot be asked for a checkpoint now, even if it may yield; None if it can."""
        if now < self.save_retry_at:
            return f"its last checkpoint failed ({self.note}); next try in {self.save_retry_at - now:.0f} s"
        return self.unable_reason(lease) or self.unattached_reason(lease)

    def unyielding_reason(self, now: float) -> str:
        """Return the reason why the job is not asked to yield, although its ranks can stop at a boundary; else ""."""
        if now < self.retry_at:
            last = "its last stop" if self.refusals < MAX_REFUSALS else f"each of its last {self.refusals} stops"
            return f"{last} failed ({self.note}); next try in {self.retry_at - now:.0f} s"
        return self.useless

    def unable_reason(self, lease: Lease) -> str | None:
        """Return the reason why the job's ranks cannot stop at a boundary, for a yield or a checkpoint; else None."""
        if self.fault or not lease.managed:
            return self.fault or "it did not opt in"
        if self.divided:
            return self.divided
        if not lease.gpus:
            return "its GPUs are not known to the agent"
        if self.driver:
            return self.driver
        return None if self.freezable else self.unattached_reason(lease)

    def unattached_reason(self, lease: Lease) -> str | None:
        """Return the reason why the ranks cannot be asked to stop, naming the missing ones; None if they can."""
        if self.detached:
            return self.detached
        if not self.ranks:
            return "no process has attached: call cadenza's attach() or start it with `cadenza run`"
        if disconnected := sorted(rank.hello.rank for rank in self.ranks.values() if rank.session is None):
            return f"rank {disconnected[0]} has lost its connection to the agent"
        numbers = Counter(rank.hello.rank for rank in self.ranks.values())
        number, count = numbers.most_common(1)[0]
        if count > 1 and lease.hosts > 1:
            return f"{count} processes attached as rank {number}: hosts that train apart cannot stop together"
        expected = max(rank.expected_here(lease.hosts) for rank in self.ranks.values())
        return None if len(numbers) >= expected else f"{len(numbers)} of {expected} ranks have attached"

    @property
    def telemetry(self) -> Telemetry:
        """The furthest step and the slowest rank's iteration times."""
        each = [rank.page.telemetry() for rank in self.ranks.values()]
        return Telemetry(
            max((one.step for one in each), default=0),
            max((one.iteration_s for one in each if one.iteration_s is not None), default=None),
            max((one.iteration_p99_s for one in each if one.iteration_p99_s is not None), default=None),
        )
