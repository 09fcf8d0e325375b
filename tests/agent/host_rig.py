"""An agent's state and handlers in memory, without a daemon, a service or a driver; its clock moves by hand."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders, wire
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.handlers.job_side import JobHandler
from cadenza.sidecar.agent.handlers.service_side import Reporter, ServiceHandler
from cadenza.sidecar.agent.ipc.memory_use import HostMemory
from cadenza.sidecar.agent.ipc.processes import Peer
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.state_files import LeaseFile
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.agent_settings import AgentSettings

ROOT, USER = 0, 1000


@dataclass
class Time:
    passed: float = 100.0

    def now(self) -> float:
        return 1_700_000_000.0 + self.passed

    def monotonic(self) -> float:
        return self.passed


class SilentSocket:
    """The agent's end of a connection: takes every packet, and keeps those of the agent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def send(self, packet: bytes) -> None:
        self.sent.append(wire.decode(packet))

    def sendmsg(self, parts: list[bytes], *_: object) -> None:
        self.send(b"".join(parts))


class HostInMemory:
    """The agent's parts of one host, and one pass of its event loop."""

    def __init__(self, directory: Path) -> None:
        self.time = Time()
        self.host = Host(AgentSettings(), self.time, "n1")
        driver = DriverController(self.host, lambda: 0, Channel(self.time, directory / "lock", lambda *_: None))
        self.coordinator = StopCoordinator(self.host, lambda: 1 << 40, driver)
        self.arbiter = Arbiter(self.host, self.coordinator)
        self.jobs = JobHandler(self.host, self.coordinator, self.arbiter, frozenset({ROOT}), lambda _: None)
        self.service = ServiceHandler(self.host, self.coordinator, *(cast("Any", None),) * 2)
        self.reporter = Reporter(
            self.host,
            "1",
            memory=lambda: HostMemory(1 << 20, 1 << 20),
            telemetry=lambda _: None,
            tuned=lambda _: None,
            lacks=tuple,
            prefetched=tuple,
        )
        self.file = LeaseFile(directory, "boot", directory / "run")

    def close(self) -> None:
        """Close the pages of all ranks."""
        for run in self.host.jobs.values():
            for rank in run.ranks.values():
                rank.page.close()

    def begin_anew(self) -> None:
        """Become another host, without jobs."""
        self.close()
        self.__init__(self.file.path.parent)  # type: ignore[misc]

    def session(self, uid: int = USER, pid: int | None = None) -> Session:
        """Return a connection of a process; the agent takes the test's own for alive."""
        return Session(cast("socket.socket", SilentSocket()), Peer(pid or os.getpid(), uid))

    def said(self, session: Session) -> list[dict[str, Any]]:
        return cast("Any", session.sock).sent

    def register(self, job: int, gpus: list[int], **fields: Any) -> None:
        """Register a job as the SPANK plugin does."""
        known = {"uid": USER, "user": "u", "node": "n1", "managed": True, "hosts": 1, "gpus": gpus, **fields}
        self.jobs.handle(self.session(ROOT), wire.encode("start", job=job, **known))

    def attach(self, job: int, pid: int, **fields: Any) -> Session:
        """Attach a rank of a job, and return its connection."""
        session = self.session(pid=pid)
        self.jobs.handle(session, wire.encode("attach", job=job, **fields))
        return session

    def of(self, job: int) -> Lease:
        lease = self.host.leases.get(JobKey(job, 0))
        assert lease is not None
        return lease

    def run_once(self, seconds: float = 0.1) -> orders.Report:
        """Make a pass of the event loop; return the report, as the service reads it."""
        self.time.passed += seconds
        for lease in self.host.handled:
            with self.host.supervise(lease.key, "its stop"):
                self.coordinator.advance(lease)
        self.arbiter.settle()
        self.host.update_step_rates()
        self.file.write(tuple(self.host.leases), None)
        assert len(self.file.read().leases) == len(self.host.leases)
        self.host.outbox.flush()
        messages, self.host.upward = self.host.upward, []
        for message in messages:
            msgspec.json.decode(msgspec.json.encode(message), type=orders.FromAgent)
        self.reporter._sent_at = float("-inf")
        report = self.reporter.due()
        assert report is not None
        return msgspec.json.decode(msgspec.json.encode(report), type=orders.Report)
