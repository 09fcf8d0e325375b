"""The agent's event loop: one thread for the socket, its peers, their processes, the service, the timers."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]
import zmq

from cadenza.sidecar import orders
from cadenza.sidecar.agent.driver.channel import Channel
from cadenza.sidecar.agent.driver.process_control import DriverController
from cadenza.sidecar.agent.errors import AgentError, StateFileError
from cadenza.sidecar.agent.handlers.job_side import JobHandler
from cadenza.sidecar.agent.handlers.reports import Reporter
from cadenza.sidecar.agent.handlers.service_side import ServiceHandler
from cadenza.sidecar.agent.ipc.processes import boot_id, open_pidfd, start_ticks
from cadenza.sidecar.agent.ipc.service_link import Link, read_keys
from cadenza.sidecar.agent.ipc.transport import Listener, Session, notify_ready
from cadenza.sidecar.agent.jobs import step_rate
from cadenza.sidecar.agent.jobs.clock_jumps import Jumps
from cadenza.sidecar.agent.jobs.host_state import NO_FACTS, Host
from cadenza.sidecar.agent.leases.lease_file import LeaseFile, still_running
from cadenza.sidecar.agent.leases.lease_table import Lease, LeaseTable
from cadenza.sidecar.agent.prefetch.prefetcher import Prefetcher
from cadenza.sidecar.agent.telemetry.collector import Collector
from cadenza.sidecar.agent.telemetry.gpus import nvml_devices
from cadenza.sidecar.agent.telemetry.records import Records
from cadenza.sidecar.agent.telemetry.sampler import Background, Sampler
from cadenza.sidecar.agent.tuning import topology
from cadenza.sidecar.agent.tuning.state_file import TuningFile
from cadenza.sidecar.agent.tuning.tuner import Tuner
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator
from cadenza.sidecar.agent.turns.driver_outcomes import Endings
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.clock import SystemClock

log = logging.getLogger(__name__)

STOPPING_TICK_S = 0.004
"""How often the pages are read while a job is being stopped."""
TICK_S = 0.2
"""How often timers are looked at."""
SWEEP_S = 1.0
"""How often processes without a pidfd are looked for."""
PACKETS_A_TURN = 64
"""How many packets of one peer are read before the others' turn."""


class Daemon:
    """One agent. ``privileged`` are the uids that may register and end jobs."""

    def __init__(self, settings: AgentSettings, version: str, privileged: frozenset[int] = frozenset({0})) -> None:
        clock = SystemClock()
        self._settings = settings
        self._lock = _sole(Path(settings.state_dir))
        self._file = LeaseFile(Path(settings.state_dir), boot_id())
        self.host = Host(settings, clock, settings.host_name, started_at=clock.monotonic())
        self._driver = DriverController(
            self.host, _free_memory, Channel(clock, Path(settings.state_dir) / "driver.lock", self._watch_helper)
        )
        self._coordinator = StopCoordinator(self.host, _free_memory, self._driver)
        self._driver.ends = Endings(self._coordinator)
        arbiter = Arbiter(self.host, self._coordinator)
        self._job_side = JobHandler(self.host, self._coordinator, arbiter, privileged, self._watch)
        self._arbiter = arbiter
        self._tuner = Tuner(self.host, TuningFile(Path(settings.state_dir), boot_id()), topology.read())
        self._prefetcher = Prefetcher(self.host)
        self._service_side = ServiceHandler(self.host, self._coordinator, arbiter, self._tuner, self._prefetcher)
        self._collector = Collector(self.host, Background(Sampler(clock, nvml_devices)), Records(settings))
        latest, in_force = self._collector.latest, self._tuner.in_force
        self._reporter = Reporter(self.host, version, _memory_mb, latest, in_force, self._lacks, self._prefetched)
        self._jumps = Jumps(self.host)
        self._poller = zmq.Poller()
        self._pidfds: dict[int, int] = {}
        """pidfd by pid."""
        self._written = -1
        self._next_tick = self._next_sweep = 0.0
        self._stop = False
        self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._wakeup[0], zmq.POLLIN)
        self._recover()
        self._tuner.recover()
        self._link = self._linked()
        self._listener = Listener(Path(settings.socket))
        self._poller.register(self._listener.socket.fileno(), zmq.POLLIN)

    # --- start and end -------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Take over the leases of an earlier agent whose jobs still have a process here."""
        saved = self._file.load()
        self.host.facts = saved.facts or NO_FACTS
        kept = [lease for lease in saved.leases if _revive(lease)]
        self.host.leases = LeaseTable(kept)
        for lease in kept:
            log.info("recovered JOBID=%s lease=%s gpus=%s", lease.key, lease.state, lease.gpus)
            for process in lease.processes:
                self._watch(process.pid)
        self._driver.recover()

    def _linked(self) -> Link | None:
        """Return the link to the service, or None when there is none to be had: turns are local then."""
        if not self._settings.service:
            log.info("no service configured: jobs take turns locally")
            return None
        keys = read_keys(Path(self._settings.keys))
        if keys is None:
            return None
        link = Link(self._settings.service, self.host.name, keys)
        self._poller.register(link.socket, zmq.POLLIN)
        return link

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; leases stay on disk and jobs run on."""
        previous = signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        notify_ready()
        log.info("ready host=%s socket=%s jobs=%d", self.host.name, self._settings.socket, len(self.host.leases))
        try:
            while not self._stop:
                self.turn()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous)
            self.close()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stop = True

    def close(self) -> None:
        """Close everything that is open."""
        self._listener.close()
        self._driver.close()
        self._tuner.restore()
        self._collector.close()
        self._prefetcher.close()
        if self._link is not None:
            self._link.close()
        for descriptor in (*self._pidfds.values(), *self._wakeup):
            os.close(descriptor)
        self._lock.close()

    # --- the loop ------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Wait for something to happen, deal with it, write leases down, and only then speak."""
        stopping = any(run.stop is not None and not run.stop.committed for run in self.host.jobs.values())
        wait = STOPPING_TICK_S if stopping else TICK_S
        events = self._poller.poll(int(wait * 1000))
        self._jumps.tick()  # before anything is written into the book
        for ready, _ in events:
            self._deal_with(ready)
        self._timers()
        if self._write_down():
            for session in self.host.outbox.flush():
                self._lose(session)
            self._driver.flush()
            self._report()

    def _deal_with(self, ready: object) -> None:
        """Call what belongs to a socket or descriptor that has something to read."""
        if self._link is not None and ready is self._link.socket:
            for order in self._link.receive():
                self._service_side.obey(order)
        elif not isinstance(ready, int):
            log.error("nothing belongs to %r", ready)
        elif ready == self._listener.socket.fileno():
            self._accept()
        elif ready == self._wakeup[0]:
            os.read(ready, 512)
        elif session := self._listener.sessions.get(ready):
            self._read(session)
        else:
            self._process_ended(ready)

    def _accept(self) -> None:
        """Take all new connections."""
        while session := self._listener.accept():
            self._poller.register(session.sock.fileno(), zmq.POLLIN)

    def _read(self, session: Session) -> None:
        """Handle what a peer has sent."""
        for _ in range(PACKETS_A_TURN):
            packet = session.receive()
            if packet is None:
                return
            if not packet:
                self._lose(session)
                return
            self._handle(session, packet)

    def _handle(self, session: Session, packet: bytes) -> None:
        """Handle one packet; a fault of this program costs the one connection, not the daemon."""
        try:
            self._job_side.handle(session, packet)
        except AgentError:
            raise
        except Exception:
            log.exception("fault while handling a packet pid=%d", session.peer.pid)
            self.host.outbox.post(session, "error", last=True, error="the agent failed on this; see its log")

    def _lose(self, session: Session) -> None:
        """Forget a connection."""
        descriptor = session.sock.fileno()
        if self._listener.sessions.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)
            session.sock.close()
            self._job_side.lost(session)

    # --- processes -----------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> None:
        """Ask to be woken when a process ends."""
        if pid not in self._pidfds and (descriptor := open_pidfd(pid)) is not None:
            self._pidfds[pid] = descriptor
            self._poller.register(descriptor, zmq.POLLIN)

    def _watch_helper(self, descriptor: int, there: bool) -> None:  # noqa: FBT001
        """Wake up, or do so no more, when the driver path's helper says something; its tick reads it."""
        if there:
            self._poller.register(descriptor, zmq.POLLIN)
        else:
            self._poller.unregister(descriptor)

    def _process_ended(self, descriptor: int) -> None:
        """Tell the server that a watched process has ended."""
        pid = next((pid for pid, known in self._pidfds.items() if known == descriptor), None)
        if pid is not None:
            self._poller.unregister(descriptor)
            os.close(self._pidfds.pop(pid))
            self._job_side.process_gone(pid)

    def _sweep(self) -> None:
        """Find ended processes for which no pidfd was to be had."""
        for lease in self.host.leases:
            alive = still_running(lease, start_ticks)
            for process in lease.processes:
                if process not in alive and process.pid not in self._pidfds:
                    self._job_side.process_gone(process.pid)

    # --- timers and output ---------------------------------------------------------------------------------

    def _timers(self) -> None:
        """Move stops on, and every now and then everything else."""
        self._driver.tick()
        for lease in self.host.leases:
            self._coordinator.tick(lease)
        now = self.host.clock.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._job_side.tick()
        if now >= self._next_sweep:
            self._next_sweep = now + SWEEP_S
            self._sweep()
        self._arbiter.settle()
        step_rate.look(self.host)
        self._tuner.tick()
        self._collector.tick()
        self._prefetcher.tick()

    def _write_down(self) -> bool:
        """Bring leases.json up to date; while that fails nothing is told to anyone."""
        book = self.host.leases
        if book.changed == self._written:
            return True
        try:
            self._file.save(tuple(book), None if self.host.facts is NO_FACTS else self.host.facts)
        except StateFileError as error:
            log.error("leases are held back: %s", error)  # noqa: TRY400 - the message says it all
            return False
        self._written = book.changed
        return True

    def _lacks(self) -> tuple[str, ...]:
        """Return what the settings ask for and this host cannot do."""
        return tuple(lack for lack in (self._driver.lack, self._tuner.lack) if lack)

    def _prefetched(self) -> tuple[orders.Prefetched, ...]:
        """Return what was read for jobs that are to come."""
        return tuple(self._prefetcher.prefetched.values())

    def _report(self) -> None:
        """Send the service what it is to know."""
        messages, self.host.upward = self.host.upward, []
        if self._link is not None:
            self._link.send(messages)
            if report := self._reporter.due():
                self._link.send((report,))


def _revive(lease: Lease) -> bool:
    """Bring a saved lease to what holds after a restart; False when its job is gone.

    A stop that was under way is void: ranks that had moved out are told to take their state back.
    """
    lease.processes = still_running(lease, start_ticks)
    if lease.state == "stopping":
        lease.state = "held"
    return bool(lease.processes)


def _free_memory() -> int:
    """Return the bytes of host memory that can be taken now."""
    return int(psutil.virtual_memory().available)


def _memory_mb() -> tuple[int, int]:
    """Return total and available host memory in MB."""
    memory = psutil.virtual_memory()
    return memory.total >> 20, memory.available >> 20


def _sole(directory: Path) -> IO[str]:
    """Return the lock of the state directory; raise StateFileError when another agent has it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "agent.lock").open("a", encoding="ascii")
    except OSError as error:
        raise StateFileError(f"{directory}: cannot be used for leases: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        with contextlib.suppress(OSError):
            lock.close()
        raise StateFileError(f"{directory}: another agent is running on it") from None
    return lock
