"""The agent's event loop: one thread for the socket, its peers, their processes, the service and the timers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import zmq

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.addresses import link
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.errors import StateFileError
from cadenza.sidecar.agent.handlers.job_side import JobHandler
from cadenza.sidecar.agent.handlers.service_side import Reporter, ServiceHandler
from cadenza.sidecar.agent.ipc.memory_use import host_memory
from cadenza.sidecar.agent.ipc.peers import Peers
from cadenza.sidecar.agent.ipc.processes import boot_id, open_pidfd, start_ticks
from cadenza.sidecar.agent.ipc.service_link import Link, read_keys
from cadenza.sidecar.agent.ipc.slurm_steps import steps
from cadenza.sidecar.agent.ipc.transport import Listener, Session
from cadenza.sidecar.agent.jobs.host_state import NO_FACTS, Host
from cadenza.sidecar.agent.leases import handover
from cadenza.sidecar.agent.leases.book import Book
from cadenza.sidecar.agent.leases.lease_table import LeaseTable
from cadenza.sidecar.agent.prefetch.prefetcher import Prefetcher
from cadenza.sidecar.agent.relay import Relay
from cadenza.sidecar.agent.state_files import LeaseFile, TuningFile
from cadenza.sidecar.agent.telemetry.collector import Collector
from cadenza.sidecar.agent.telemetry.gpu_job_files import GpuJobFiles
from cadenza.sidecar.agent.telemetry.gpu_watch import GpuWatch
from cadenza.sidecar.agent.telemetry.gpus import nvml_devices
from cadenza.sidecar.agent.telemetry.records import Records
from cadenza.sidecar.agent.telemetry.sampler import Background, Sampler
from cadenza.sidecar.agent.tuning import topology
from cadenza.sidecar.agent.tuning.tuner import Tuner
from cadenza.sidecar.agent.turns.arbiter import WATCH_S, Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.agent.turns.early_use import EarlyUse
from cadenza.sidecar.agent.turns.memory_guard import MemoryGuard
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.config import ConfigError
from cadenza.sidecar.metrics_server import MetricsServer, new_registry
from cadenza.sidecar.orders import JobOrder, Told
from cadenza.sidecar.sd_notify import notify

log = logging.getLogger(__name__)

STOPPING_TICK_S = 0.004
"""Time between two looks at the pages while a job is being stopped."""
TICK_S = 0.2
"""Longest time between two passes of the event loop, and time between two looks at the timers of jobs."""
RETRY_S = 1.0
"""Time between two attempts to write the leases to a full disk."""
ALIVE_S = 5.0
"""Time between two notifications of systemd's watchdog; the unit's WatchdogSec is several times as long."""
STILL_S = 15.0
"""Time without a pass of the event loop after which the agent is not well."""
SWEEP_S = 1.0
"""Time between two searches for ended processes without a pidfd."""


class Daemon:
    """One agent. ``privileged`` are the uids that may register and end jobs."""

    def __init__(self, settings: AgentSettings, version: str, privileged: frozenset[int] = frozenset({0})) -> None:
        clock, state_dir = SystemClock(), Path(settings.expert.state_dir)
        self._settings = settings
        keys = self._link_keys()  # an agent whose keys are wrong leaves nothing behind
        self._lock = _lock(state_dir)
        self._file = LeaseFile(state_dir, boot_id(), settings.runtime)
        self.host = Host(settings, clock, settings.host_name, started_at=clock.monotonic())
        channel = Channel(clock, state_dir / "driver.lock", self._watch_helper)
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking, self._closed = threading.Lock(), False
        self._gpu_watch = GpuWatch(clock, nvml_devices, self._wake)
        self.host.gpu_faults = lambda: self._gpu_watch.last.faults
        self.host.divided_gpus = lambda: self._gpu_watch.last.divided
        self._driver = DriverController(self.host, _free_memory, channel)
        self._coordinator = StopCoordinator(self.host, _free_memory, self._driver, self._gpu_watch)
        self._memory_guard = MemoryGuard(self.host, self._coordinator)
        self._arbiter = Arbiter(
            self.host, self._coordinator, watched=lambda lease: self._gpu_watch.names_processes(lease.gpus)
        )
        self._job_side = JobHandler(self.host, self._coordinator, self._arbiter, privileged, self._watch)
        self._tuner = Tuner(self.host, TuningFile(state_dir, boot_id()), topology.read())
        self._prefetcher = Prefetcher(self.host)
        self._service_side = ServiceHandler(self.host, self._coordinator, self._tuner, self._prefetcher)
        self._collector = Collector(self.host, Background(Sampler(clock, nvml_devices)), Records(settings))
        self._reporter = Reporter(
            self.host,
            version,
            memory=host_memory,
            telemetry=self._collector.latest,
            tuned=self._tuner.in_force,
            lacks=lambda: tuple(lack for lack in (self._driver.lack, self._tuner.lack) if lack),
            prefetched=lambda: tuple(self._prefetcher.results.values()),
        )
        self._ticks = {
            "tuning": self._tuner.tick,
            "telemetry": self._collector.tick,
            "looking at the GPUs": self._gpu_watch.tick,
            "prefetching": self._prefetcher.tick,
            "watching for early use": EarlyUse(self.host, self._gpu_watch).tick,
        }
        self._poller = zmq.Poller()
        self._gpu_jobs = GpuJobFiles(settings.runtime)
        self._count: Callable[[Sequence[object]], object] = lambda _: None
        self._passed_s = clock.monotonic()
        """Monotonic time of the event loop's last pass."""
        self._watched: dict[int, int] = {}
        """Pid by pidfd."""
        self._written = -1
        self._next_tick = self._next_sweep = self._next_retry = 0.0
        self._stop = False
        self._poller.register(self._wakeup[0], zmq.POLLIN)
        self._recover()
        self._tuner.recover()
        self._links = [Link(address, keys) for address in settings.agent.service.split(",")] if keys else []
        for one in self._links:
            self._poller.register(one.socket, zmq.POLLIN)
        self._relay = Relay(settings, clock, self._wake)
        try:
            if self._links:
                self._relay.start()
        except OSError as error:
            log.warning("%s: %s; jobs here cannot ask the service", self._relay.path, error.strerror or error)
        listener = Listener(Path(settings.expert.socket))
        link.link(link.LIBRARY, settings.runtime)
        self._peers = Peers(listener, self._poller, clock, privileged, self._handle, self._job_side.lost)
        self._server = self._metrics_server(version) if settings.agent.metrics else None

    # --- start and end -------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Rebuild the book of leases from what is on the host; no lease is given before.

        A stop that was under way is void: ranks that had moved out are told to take their state back.
        """
        saved = self._file.recover()
        self.host.facts = saved.facts or NO_FACTS
        handovers = handover.read_all(self._settings.runtime / "jobs")
        book = Book(self.host.name, saved.leases, handovers, steps(), self._gpu_watch.start, self.host.clock.now())
        book.rebuild()
        self.host.leases, self.host.taken = LeaseTable(book.leases), book.taken
        for taken in book.taken:
            log.warning("GPU taken: %s", taken)
        for lease in self.host.leases:
            log.info("recovered JOBID=%s lease=%s gpus=%s", lease.key, lease.state, lease.gpus)
            for process in lease.processes:
                self._watch(process.pid)
        self._driver.recover()

    def _link_keys(self) -> tuple[bytes, bytes, bytes] | None:
        """Return the keys of the link to the service; without a service or keys None, and turns are local."""
        if not self._settings.agent.service:
            log.info("no service configured: jobs take turns locally")
            return None
        return read_keys(Path(self._settings.agent.keys), self._settings.host_name)

    def _metrics_server(self, version: str) -> MetricsServer | None:
        """Return the running server of ``/metrics``; None if it cannot be had, for jobs need none."""
        try:
            registry = new_registry("agent.metrics")
            from cadenza.sidecar.agent.telemetry.agent_metrics import AgentMetrics  # noqa: PLC0415 - an extra

            self._count = AgentMetrics(registry, self.host, version).messages
            return MetricsServer(self._settings.agent.metrics, "agent.metrics", registry, self.illness)
        except ConfigError as error:
            log.error("no metrics: %s", error)  # noqa: TRY400 - the message is complete
            return None

    def illness(self) -> str:
        """Return why this agent serves no job, in one line; "" if it does. For any thread."""
        still_s = self.host.clock.monotonic() - self._passed_s
        return f"the event loop has stood still for {still_s:.0f} s" if still_s > STILL_S else ""

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; leases stay on disk and jobs run on."""
        # A poll that a signal interrupts is begun again (PEP 475): the byte that Python writes into this pipe ends it.
        previous = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        notify("READY=1")
        log.info("ready host=%s socket=%s jobs=%d", self.host.name, self._settings.expert.socket, len(self.host.leases))
        try:
            alive_at = 0.0
            while not self._stop:
                self.turn()
                if self.host.clock.monotonic() >= alive_at + ALIVE_S:
                    alive_at = self.host.clock.monotonic()
                    notify("WATCHDOG=1")
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous)
            self.close()

    def _wake(self) -> None:
        """Start the next pass of the event loop at once; called by threads, which may outlive the agent's close."""
        with self._waking, contextlib.suppress(BlockingIOError):  # it is awake
            if not self._closed:  # the pipe's number may be another file's by now
                os.write(self._wakeup[1], b"\0")

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = True

    def close(self) -> None:
        """Close everything that is open."""
        if self._server is not None:
            self._server.close()
        self._peers.listener.close()
        self._relay.close()
        self._driver.close()
        self._gpu_watch.close()
        self._tuner.restore()
        self._collector.close()
        self._prefetcher.close()
        for one in self._links:
            one.close()
        with self._waking:
            self._closed = True
            for descriptor in (*self._watched, *self._wakeup):
                os.close(descriptor)
        self._lock.close()

    # --- the loop ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Make one pass of the event loop: messages first, decisions next, and answers once the leases are on disk."""
        # 1. Wait for an event; while a job is being stopped its ranks' pages are read often.
        tick_s = STOPPING_TICK_S if self.host.stopping else WATCH_S if self._arbiter.watching else TICK_S
        self._passed_s = self.host.clock.monotonic()
        events = self._poller.poll(int(tick_s * 1000))
        # 2. Move the leases' times along if the wall clock jumped, before anything is written into them.
        self.host.follow_clock()
        # 3. Record the messages of jobs, plugins and the service, and the ends of processes.
        ready = {one for one, _ in events}
        for one in self._links:
            if one.socket in ready:
                self._obey(one)
        if self._wakeup[0] in ready:
            os.read(self._wakeup[0], 512)
        ended = self._watched.keys() & ready  # the number of a connection that ends now may soon be a new pidfd's
        self._peers.serve([one for one in ready if isinstance(one, int)])
        for descriptor in ended:
            pid = self._watched.pop(descriptor)
            self._poller.unregister(descriptor)
            os.close(descriptor)
            with self.host.supervise(None, "the end of a process"):
                self._job_side.process_gone(pid)
        self._relay.pass_on(self._links)
        self._sweep()
        # 4. Move stops on: by the driver path's answers, then by the ranks' progress.
        with self.host.supervise(None, "the driver path"):
            self._driver.tick()
        for lease in self.host.handled:
            with self.host.supervise(lease.key, "its stop"):
                self._coordinator.advance(lease)
        # 5. Forget jobs that are gone, and give their GPUs and all others that are free to the next in turn.
        self._take_turns()
        # 6. Follow step rates, CPU and memory limits, telemetry and prefetches.
        self.host.update_step_rates()
        for name, tick in self._ticks.items():
            with self.host.supervise(None, name):
                tick()
        # 7. Write the leases to disk; only then tell jobs, driver path and service about them.
        if self._write_leases():
            self._gpu_jobs.write(self.host.leases, self._gpu_watch.last)
            for session in self.host.outbox.flush():
                self._peers.lose(session)
            self._driver.flush()
            self._report()

    def _take_turns(self) -> None:
        """Forget jobs that are gone, give out free GPUs, and answer plugins that wait for one."""
        now = self.host.clock.monotonic()
        if ticking := now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._peers.tick()
            self._job_side.drop_gone()
            self.host.release_taken()
        with self.host.supervise(None, "guarding the host's memory"):
            self._memory_guard.tick()
        with self.host.supervise(None, "taking turns"):
            self._arbiter.settle()
        if ticking:
            with self.host.supervise(None, "answers to waiting plugins"):
                self._job_side.reply_to_waiters()

    def _obey(self, link: Link) -> None:
        """Carry out the orders that have come in."""
        for order in link.receive():
            if isinstance(order, Told):
                self._relay.told(order)
                continue
            key = JobKey(order.job, order.restart) if isinstance(order, JobOrder) else None
            with self.host.supervise(key, "an order of the service"):
                self._service_side.obey(order)

    def _handle(self, session: Session, packet: bytes) -> None:
        """Handle one packet; a fault of this program costs the one connection and its job, not the daemon."""
        handled = False
        with self.host.supervise(session.key, "a packet"):
            self._job_side.handle(session, packet)
            handled = True
        if not handled:
            self.host.outbox.post(session, "error", last=True, error="the agent failed on this; see its log")

    # --- processes -----------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> None:
        """Wake up when a process ends; without a descriptor to spare the sweep finds its end."""
        if pid in self._watched.values() or (descriptor := open_pidfd(pid)) is None:
            return
        if self._job_side.files.is_reserved(descriptor):
            os.close(descriptor)
            return
        self._watched[descriptor] = pid
        self._poller.register(descriptor, zmq.POLLIN)

    def _watch_helper(self, descriptor: int, there: bool) -> None:  # noqa: FBT001
        """Start or stop waking up for answers of the driver path's helper; its tick reads them."""
        if there:
            self._poller.register(descriptor, zmq.POLLIN)
        else:
            self._poller.unregister(descriptor)

    def _sweep(self) -> None:
        """Find ended processes that have no pidfd, once a second."""
        now = self.host.clock.monotonic()
        if now < self._next_sweep:
            return
        self._next_sweep = now + SWEEP_S
        for lease in self.host.leases:
            with self.host.supervise(lease.key, "its processes"):
                alive = lease.running_processes(start_ticks)
                for process in lease.processes:
                    if process not in alive and process.pid not in self._watched.values():
                        self._job_side.process_gone(process.pid)

    # --- output --------------------------------------------------------------------------------------------

    def _write_leases(self) -> bool:
        """Bring leases.json up to date; while that fails, no job hears of a lease.

        While its disk is full, the spare file takes the leases, and the disk is tried once a second.
        """
        leases, now = self.host.leases, self.host.clock.monotonic()
        if leases.changed == self._written and not (self._file.fault and now >= self._next_retry):
            return True
        self._next_retry = now + RETRY_S
        before = self._file.fault
        try:
            self._file.write(tuple(leases), None if self.host.facts is NO_FACTS else self.host.facts)
        except StateFileError as error:
            log.error("leases are held back: %s", error)  # noqa: TRY400 - the message is complete
            return False
        if self._file.fault != before:
            self.host.faults = (f"{self._file.fault}; leases are kept in memory",) if self._file.fault else ()
            log.warning("%s", self.host.faults[0] if self.host.faults else "leases are on the disk again")
        self._written = leases.changed
        return True

    def _report(self) -> None:
        """Send the service the queued messages, and a report if one is due."""
        messages, self.host.upward = self.host.upward, []
        self._count(messages)
        if self._links and (report := self._reporter.due()):
            messages = [*messages, report]
        for one in self._links:  # the service of a controller in standby hears all, and says nothing
            one.send(messages)


def _free_memory() -> int:
    """Return the free bytes of host memory."""
    return host_memory().available


def _lock(directory: Path) -> IO[str]:
    """Return the lock of the state directory; raise StateFileError if another agent has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "agent.lock").open("a", encoding="ascii")
    except OSError as error:
        raise StateFileError(f"{directory}: cannot be used for leases: {error.strerror}") from None
    try:
        # The kernel lets go of this lock with the process, however that ends: a killed agent leaves none behind.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):
            lock.close()
        raise StateFileError(f"{directory}: another agent is running on it") from None
    return lock
