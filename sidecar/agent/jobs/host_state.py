"""The agent's whole state in one value: settings, lease book, jobs, and what waits to leave."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.ipc.transport import Outbox
from cadenza.sidecar.agent.jobs.job_run import JobRun
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable, Stretch
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.clock import Clock

NO_FACTS = orders.Facts(orders.VERSION, jobs=(), slice_s=60.0, share_between_users=False, enforce=True)
"""What holds before the service has ever spoken."""


@dataclass
class Host:
    """Shared by the parts of the agent; only the event loop's thread touches it."""

    settings: AgentSettings
    clock: Clock
    name: str
    leases: LeaseTable = field(default_factory=LeaseTable)
    jobs: dict[JobKey, JobRun] = field(default_factory=dict)
    facts: orders.Facts = NO_FACTS
    outbox: Outbox = field(default_factory=Outbox)
    upward: list[orders.FromAgent] = field(default_factory=list)
    """Messages for the service."""
    last_order: int = 0
    heard_at: float | None = None
    """Monotonic time of the service's last message."""
    started_at: float = 0.0

    def rotating(self) -> bool:
        """Whether the service has been silent for so long that turns are taken here."""
        if not self.settings.service:
            return True
        last = self.started_at if self.heard_at is None else self.heard_at
        return self.clock.monotonic() - last > self.settings.service_timeout_s

    def next_order(self) -> int:
        """Return a number that no order of this agent has had; a restarted agent does not repeat one."""
        self.last_order = max(self.last_order + 1, int(self.clock.now() * 1000))
        return self.last_order

    def run(self, key: JobKey) -> JobRun:
        """Return the run of a job in the book, new when there is none yet."""
        return self.jobs.setdefault(key, JobRun(key))

    def files(self, lease: Lease, paths: Iterable[str]) -> orders.Files:
        """Return what other hosts are told of a job's files; names that no line can hold are left out."""
        names = tuple(path for path in paths if path.isprintable())
        return orders.Files(orders.VERSION, self.name, lease.job, lease.restart, lease.uid, names)

    def ended_stretch(self, stretch: Stretch) -> None:
        """Tell the service of a stretch of holding GPUs."""
        self.upward.append(
            orders.LeaseLog(
                v=orders.VERSION,
                host=self.name,
                job=stretch.key.id,
                restart=stretch.key.restart,
                gpus=stretch.gpus,
                from_s=stretch.from_s,
                to_s=stretch.to_s,
            )
        )

    def lease_report(self, lease: Lease) -> orders.LeaseReport:
        """Return what the service may know of one job."""
        now = self.clock.now()
        run = self.run(lease.key)
        why = run.why_not_ready(lease, self.clock.monotonic())
        counters = run.telemetry()
        return orders.LeaseReport(
            job=lease.job,
            restart=lease.restart,
            uid=lease.uid,
            node=lease.node,
            gpus=lease.gpus,
            state=lease.state,
            managed=lease.managed,
            vtime_s=lease.vtime(now),
            held_s=lease.held_s(now),
            since_s=lease.since_s,
            ranks=len(run.connected()),
            world_size=run.world_size(),
            hosts=lease.hosts,
            ready=not why,
            why_not_ready=why,
            step=counters.step,
            iteration_s=counters.iteration_s,
            iteration_p99_s=counters.iteration_p99_s,
            note=run.note,
            requeue_owner=run.requeue_owner(),
            checkpoints=run.saves,
            saved=run.saved,
            lost=run.lost,
            pace=run.pacer.measure(run.ranks, self.clock.monotonic()),
            pack=lease.pack,
        )
