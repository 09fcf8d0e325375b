"""The agents' side of the service: a ZeroMQ ROUTER with CURVE keys in a thread of its own.

The thread receives reports, sends orders, coordinates the stops of multi-node jobs, and repeats the facts that
keep agents from taking turns by themselves, however long a round takes. When rounds fail it stops, and after a
time-out the agents take turns on their own. Callers get copies of its data.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from cadenza.policies.core.actions import Outcome
from cadenza.policies.core.model import ClusterSnapshot, JobKey, Share
from cadenza.policies.core.text import printable
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.frames import ERRORS, FROM_AGENT, OtherVersionError
from cadenza.sidecar.orders import (
    VERSION,
    Ask,
    CheckpointOrder,
    Facts,
    Files,
    FromAgent,
    LeaseLog,
    OtherVersion,
    Report,
    ResumeOrder,
    Steps,
    Switched,
    ToAgent,
    Tune,
    YieldOrder,
)
from cadenza.sidecar.token_bucket import Bucket
from cadenza.slurm_plugin.errors import HubError
from cadenza.slurm_plugin.service.agents.agent_registry import Agent, AgentRegistry, Event
from cadenza.slurm_plugin.service.agents.attribution import Attribution, ForRecord
from cadenza.slurm_plugin.service.agents.curve_keys import AgentKeys, service_pair
from cadenza.slurm_plugin.service.agents.prefetch_orders import PrefetchOrders
from cadenza.slurm_plugin.service.agents.stop_barrier import Orders, StopBarrier

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_FRAME = 16 * 2**20
MAX_FRAMES_A_TURN = 1000
MAX_FRAMES_UNREAD = 200
"""Frames to one agent that wait in memory, of which each may be an answer of 1 MiB; further ones are not sent."""
MAX_FRAMES_QUEUED = 32
"""Frames of one connection that wait in memory; further ones wait at the agent."""
BYTES_S = 2.0**22
BYTES_AT_ONCE = 2.0**26
FRAME_BYTES = 4096
"""Bytes that a key may send a second, and at once, as after an absence of the service; each frame counts as so many
more. Frames beyond are dropped unread."""
RECORDS_S = 50.0
RECORDS_AT_ONCE = 10_000.0
"""Messages for the record that a host may send a second, and at once; more are dropped."""
ASKS_S, ASKS_AT_ONCE = 50.0, 200.0
"""Questions of users that a host may pass on a second, and at once."""
HANDSHAKE_MS = 5000
"""Longest time of a connection until its key is checked."""
NOT_CONNECTED = "its agent is not connected; is cadenza-agent running there?"
STOP_TICK_S = 0.02
CALL_TIMEOUT_S = 5.0
LOG_PERIOD = 100
SAVE_S = 900.0
"""Longest time for saving an ordered checkpoint."""
MAX_GOAL = 300
HOLD_S = 300.0
"""Time that a job waits after it to be requeued: until the others that make way with it have saved, too, and for the
restart of a service that was killed."""


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Address, keys and patience of the link; times in seconds."""

    bind: str
    keys: Path
    heartbeat_s: float = 2.0
    alive_s: float = 6.0
    """Silence after which an agent does not count as alive."""
    yield_timeout_s: float = 60.0
    relays: frozenset[str] = frozenset()
    """Hosts that may ask for any user."""


@dataclass(frozen=True, slots=True)
class FactSheet:
    """The facts for each host's agent, as of ``at_s`` (epoch), good for ``valid_s`` seconds."""

    facts: Mapping[str, Facts]
    at_s: float
    valid_s: float


class _Route(NamedTuple):
    """The connection over which a host's agent last spoke, and the key that it has."""

    connection: bytes
    user: str


class _RefusedError(Exception):
    """A frame that does not count; ``cause`` is the name under which it is counted."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause, self.detail = cause, detail


class Hub:
    """The service's end of the link; its public methods may be called from any thread."""

    def __init__(self, settings: HubSettings, clock: SystemClock) -> None:
        """Read the keys; raise HubError naming the one at fault."""
        self.settings = settings
        self.reports = 0
        """Reports that have come."""
        self.refused: Counter[str] = Counter()
        """Refused frames by cause."""
        self.on_ask: Callable[[Ask, frozenset[str] | None], object] = lambda *_: None
        """Called in the hub's thread with a user's question, and with the users that have a job on its host, or None
        for a host that may ask for any; ``send`` sends the answer."""
        self.address = ""
        """The address at which it listens once started (``tcp://*:0`` picks a port)."""
        self._clock = clock
        self._pair = service_pair(settings.keys)
        self._keys = AgentKeys(settings.keys)
        self._keys.load()
        self._registry = AgentRegistry(settings.alive_s)
        self._stops = StopBarrier()
        self._prefetches = PrefetchOrders()
        self._attribution = Attribution()
        self._routes: dict[str, _Route] = {}
        self._budgets: dict[str, Bucket] = {}
        """Bytes that each key may send and messages that each host may have recorded; there are no more than keys."""
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._messages: SimpleQueue[ForRecord] = SimpleQueue()
        self._woken = threading.Event()
        self._sheet = FactSheet({}, 0.0, 0.0)
        self._hosts_of: Mapping[JobKey, list[str]] = {}
        """Hosts in whose facts each job is."""
        self._sheet_until_s = 0.0
        self._next_beat_s = 0.0
        self._running = False
        self._thread = threading.Thread(target=self._run, name="cadenza-hub", daemon=True)

    # --- life ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen and start the thread; raise HubError naming the address at fault."""
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", credentials_provider=self._keys)
        self._doorbell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket = self._listen(*self._pair)
        self._running = True
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and close the link; agents notice by its silence."""
        if self._running:
            self._running = False
            self._ring()
            self._thread.join()
            os.close(self._doorbell)
        self._authenticator.stop()
        self._socket.close(linger=200)
        self._context.term()

    def reload_keys(self) -> None:
        """Read the agents' keys again (SIGHUP); raise HubError and keep the old ones when they are bad."""
        self._keys.load()

    # --- for the loop -------------------------------------------------------------------------------------

    def agents(self, hosts: Iterable[str] | None = None) -> Mapping[str, Agent]:
        """Return the last report of every agent, or of those of some hosts, by host."""
        return self._ask(lambda: self._registry.agents(self._clock.monotonic(), hosts))

    def send(self, orders: Orders) -> Outcome:
        """Send each order to its host; the outcome names the hosts that are not connected."""
        return self._ask(lambda: self._send_all(orders))

    def yield_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        """Ask a job to stop and free its GPUs."""
        return self._stop(key, hosts, YieldOrder(VERSION, *key, self.settings.yield_timeout_s))

    def checkpoint_job(
        self, key: JobKey, hosts: tuple[str, ...], *, away: bool = False, goal: str = "", save_s: float = 0.0
    ) -> Outcome:
        """Ask a job to save a checkpoint at a common boundary and to wait there until it is requeued.

        ``away``: it has yielded, so that its ranks stand at one boundary and need no GPU to save. ``goal``: what it
        does then, for its own output. ``save_s``: longest time for saving, if it is less than the usual one.
        """
        longest_s = min(save_s or SAVE_S, SAVE_S)
        yield_s = self.settings.yield_timeout_s
        order = CheckpointOrder(VERSION, *key, yield_s, longest_s, HOLD_S, away, printable(goal, MAX_GOAL))
        return self.send([(host, order) for host in hosts]) if away else self._stop(key, hosts, order)

    def _stop(self, key: JobKey, hosts: tuple[str, ...], order: YieldOrder | CheckpointOrder) -> Outcome:
        """Send a stop order; for several hosts the thread then finds the common stop step."""
        if len(hosts) == 1:
            return self.send([(hosts[0], order)])
        return self._ask(lambda: self._send_all(self._stops.begin(key, hosts, self._clock.monotonic(), order)))

    def prefetch_job(self, key: JobKey, hosts: tuple[str, ...], there: tuple[str, ...], uid: int) -> Outcome:
        """Have the hosts ``there`` read the files that a job uses on its hosts, as the user ``uid``.

        Unreadable files are no failure.
        """
        return self._ask(lambda: self._send_all(self._prefetches.begin(key, hosts, there, uid)))

    def resume_job(self, key: JobKey, hosts: tuple[str, ...]) -> Outcome:
        """Prefer a job for the GPUs that it waits for, on each of its hosts."""
        return self.send([(host, ResumeOrder(VERSION, *key)) for host in hosts])

    def tune_job(self, key: JobKey, shares: Mapping[str, Share], caches_mb: Mapping[str, int | None]) -> Outcome:
        """Change a job's resources on each of these hosts, and the part of its memory that caches may take there."""
        return self.send(
            [
                (host, Tune(VERSION, *key, share.cpus, share.memory_mb, caches_mb.get(host)))
                for host, share in shares.items()
            ]
        )

    def recall(self, snapshot: ClusterSnapshot) -> None:
        """Let agents speak of the jobs of the last recorded snapshot, for the record; before the first facts."""
        self._ask(lambda: self._attribution.recall(snapshot))

    def send_facts(self, sheet: FactSheet) -> None:
        """Send new facts to all agents now, and repeat them each heartbeat as long as they are good."""

        def take() -> None:
            now_s = self._clock.monotonic()
            self._sheet, self._sheet_until_s = sheet, now_s + sheet.valid_s
            self._hosts_of = defaultdict(list)
            for host, facts in sheet.facts.items():
                for job in facts.jobs:
                    self._hosts_of[JobKey(job.job, job.restart)].append(host)
            self._next_beat_s = now_s + self.settings.heartbeat_s
            for message in self._attribution.update(sheet.facts, sheet.at_s):
                self._messages.put(message)
            self._repeat_facts()

        self._ask(take)

    def mark_suspended(self, key: JobKey, *, suspended: bool) -> None:
        """Correct the facts on one job now: an agent gives no lease to a job that Slurm has suspended."""
        self._ask(lambda: self._mark(key, suspended=suspended))

    def drain(self) -> list[ForRecord]:
        """Return the messages since the last call that belong on record."""
        messages = []
        while True:
            try:
                messages.append(self._messages.get_nowait())
            except Empty:
                return messages

    def wait(self, timeout_s: float) -> bool:
        """Wait for news that is worth a round, at most ``timeout_s``; return whether there was any."""
        happened = self._woken.wait(timeout_s)
        self._woken.clear()
        return happened

    # --- the thread -----------------------------------------------------------------------------------------

    def _listen(self, public: bytes, secret: bytes) -> zmq.Socket[bytes]:
        link: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        link.curve_publickey, link.curve_secretkey, link.curve_server = public, secret, True
        link.setsockopt(zmq.ROUTER_MANDATORY, 1)
        link.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)
        link.setsockopt(zmq.RCVHWM, MAX_FRAMES_QUEUED)
        link.setsockopt(zmq.SNDHWM, MAX_FRAMES_UNREAD)
        link.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        link.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        link.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6000)
        try:
            link.bind(self.settings.bind)
        except zmq.ZMQError as error:
            link.close(linger=0)
            self._authenticator.stop()
            raise HubError(f"[service] bind = {self.settings.bind!r}: {error.strerror}") from None
        self.address = link.getsockopt_string(zmq.LAST_ENDPOINT)
        return link

    def _ask(self, question: Callable[[], T]) -> T:
        """Have the thread answer; it owns the socket and the registry."""
        if threading.current_thread() is self._thread:
            return question()
        answer: Future[T] = Future()

        def reply() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 (handed to the caller)
                answer.set_exception(error)

        self._calls.put(reply)
        self._ring()
        try:
            return answer.result(CALL_TIMEOUT_S)
        except FutureTimeout:
            raise HubError(f"the agents' link did not answer within {CALL_TIMEOUT_S:.0f} s") from None

    def _ring(self) -> None:
        os.eventfd_write(self._doorbell, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._doorbell, zmq.POLLIN)
        while self._running:
            left_s = max(0.0, self._next_beat_s - self._clock.monotonic())
            patience_s = min(left_s, STOP_TICK_S) if self._stops.active else left_s
            ready = dict(poller.poll(int(1000 * patience_s) + 1))
            try:
                self._turn(ready)
            except Exception:
                # One error must not end the link: agents would take turns on their own without need.
                self.refused["internal"] += 1
                log.exception("agents' link: unexpected error, going on")

    def _turn(self, ready: Mapping[object, int]) -> None:
        if self._doorbell in ready:
            os.eventfd_read(self._doorbell)
        while True:
            try:
                self._calls.get_nowait()()
            except Empty:
                break
        if self._socket in ready:
            self._receive()
        now_s = self._clock.monotonic()
        if self._stops.active:
            self._send_all(self._stops.tick(now_s))
        if now_s < self._next_beat_s:
            return
        self._next_beat_s = now_s + self.settings.heartbeat_s
        for event in self._registry.newly_silent(self._clock.now(), now_s):
            self._note(event)
        if now_s < self._sheet_until_s:
            self._repeat_facts()

    def _mark(self, key: JobKey, *, suspended: bool) -> None:
        facts = dict(self._sheet.facts)
        for host in self._hosts_of.get(key, ()):
            sent = facts[host]
            jobs = tuple(
                msgspec.structs.replace(job, suspended=suspended) if (job.job, job.restart) == key else job
                for job in sent.jobs
            )
            if jobs != sent.jobs:
                facts[host] = msgspec.structs.replace(sent, jobs=jobs, at_s=self._clock.now())
                self._send(host, facts[host])
        self._sheet = replace(self._sheet, facts=facts)

    def _repeat_facts(self) -> None:
        for host, facts in self._sheet.facts.items():
            keys = frozenset((job.job, job.restart) for job in facts.jobs)
            new_jobs = self._registry.new_jobs(host, keys, self._sheet.at_s)
            self._send(host, msgspec.structs.replace(facts, jobs=(*facts.jobs, *new_jobs), at_s=self._clock.now()))

    # --- frames ---------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Take in the frames that have come, a limited number, so that calls and facts never wait long for them."""
        for _ in range(MAX_FRAMES_A_TURN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            user = str(frames[-1].get("User-Id"))
            try:
                self._take_in(self._check(frames, user))
            except _RefusedError as error:
                self._refuse(error.cause, user, error.detail)
            except Exception:
                # A host's frame costs that frame only.
                self.refused["internal"] += 1
                log.exception("agents' link: unexpected error in a frame, going on")

    def _check(self, frames: list[zmq.Frame], user: str) -> FromAgent:
        """Return the message of a connection whose key speaks for the host that it names; raise _RefusedError."""
        size = sum(len(frame.buffer) for frame in frames)
        if not self._spend(user, BYTES_S, BYTES_AT_ONCE, size + FRAME_BYTES):
            raise _RefusedError("budget", f"it sends more than {BYTES_S:.0f} bytes a second")
        if len(frames) != 2:  # noqa: PLR2004 (the connection and one struct)
            raise _RefusedError("shape", f"{len(frames)} frames, expected 2")
        try:
            message, errors = FROM_AGENT.decode(frames[1].buffer)
        except OtherVersionError as error:
            for host in self._keys.hosts_of(user):
                for event in self._registry.refuse(host, error.theirs, self._clock.now(), self._clock.monotonic()):
                    self._note(event)
            with contextlib.suppress(zmq.ZMQError):  # it is gone, or does not read
                self._socket.send_multipart([frames[0].bytes, msgspec.json.encode(OtherVersion(VERSION))], zmq.NOBLOCK)
            raise _RefusedError("version", f"{error}, this service speaks {VERSION}") from None
        except ERRORS as error:
            raise _RefusedError("format", str(error)) from None
        if not self._keys.may_send_as(user, message.host):
            raise _RefusedError("key", f"its key does not speak for {message.host!r}")
        if errors:
            self._refuse("row", user, errors[0], len(errors))
        self._keys.came(user, message.host)
        self._routes[message.host] = _Route(frames[0].bytes, user)
        return message

    def _spend(self, source: str, rate: float, size: float, tokens: float = 1.0) -> bool:
        """Take tokens from the budget of a key or host; return whether it had some left."""
        now_s = self._clock.monotonic()
        bucket = self._budgets.setdefault(source, Bucket(rate, size, size, now_s))
        enough = bucket.fill(now_s) > 0
        bucket.tokens -= tokens if enough else 0.0
        return enough

    def _refuse(self, cause: str, user: str, detail: str, number: int = 1) -> None:
        before = self.refused[cause]
        self.refused[cause] = count = before + number
        if -(-count // LOG_PERIOD) > -(-before // LOG_PERIOD):
            hosts = ",".join(sorted(self._keys.hosts_of(user))) or "?"
            log.warning("agent HOST=%s: frame or row %d refused: %s", hosts, count, detail[:200])

    def _take_in(self, message: FromAgent) -> None:
        now_s = self._clock.monotonic()
        if isinstance(message, Report):
            self.reports += 1
            for event in self._registry.update(message, self._clock.now(), now_s):
                self._note(event)
        elif isinstance(message, Steps):
            self._send_all(self._stops.on_steps(message, now_s))
        elif isinstance(message, Files):
            self._send_all(self._prefetches.on_files(message))
        elif isinstance(message, Ask):
            if not self._spend(f"ask {message.host}", ASKS_S, ASKS_AT_ONCE):
                raise _RefusedError("asks", f"it passes on more than {ASKS_S:.0f} questions a second")
            facts = self._sheet.facts.get(message.host)
            users = frozenset(job.user for job in facts.jobs) if facts else frozenset()
            self.on_ask(message, None if message.host in self.settings.relays else users)
        else:
            if isinstance(message, Switched):
                self._send_all(self._stops.on_switched(message))
            self._note(by_our_clock(message, self._registry.ahead_s(message.host)))

    def _note(self, message: ForRecord) -> None:
        """Pass a message on for the record if it is on a job of its host; news of a job start a round early."""
        of_job = isinstance(message, Event) and message.kind == "prefetched" and message.job is not None
        if of_job and self._prefetches.reads(JobKey(message.job or 0, message.restart or 0), message.host):
            counted: list[ForRecord] = [message]
        else:
            counted = self._attribution.take(message, self._clock.now())
        for one in counted:
            if self._spend(f"host {one.host}", RECORDS_S, RECORDS_AT_ONCE):
                self._messages.put(one)
            else:
                self.refused["record"] += 1
        if isinstance(message, Event) and (counted or message.kind == "registered"):
            self._woken.set()

    def _send_all(self, orders: Orders) -> Outcome:
        failed = [f"{host}: {error}" for host, order in orders if (error := self._send(host, order)) is not None]
        return Outcome(not failed, "; ".join(failed))

    def _send(self, host: str, order: ToAgent) -> str | None:
        """Send one order; return the error if it cannot be sent."""
        route = self._routes.get(host)
        if route is None or not self._keys.may_send_as(route.user, host):
            return NOT_CONNECTED
        try:
            self._socket.send_multipart([route.connection, msgspec.json.encode(order)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return NOT_CONNECTED
            return f"{error.strerror}; its agent does not read"
        return None


def by_our_clock(message: Switched | LeaseLog, ahead_s: float) -> Switched | LeaseLog:
    """Return a message with its moments by the service's clock; its host's clock is ``ahead_s`` seconds ahead of it."""
    if not ahead_s:
        return message
    if isinstance(message, Switched):
        return msgspec.structs.replace(message, at_s=message.at_s - ahead_s)
    return msgspec.structs.replace(message, from_s=message.from_s - ahead_s, to_s=message.to_s - ahead_s)
