"""Handler of messages from jobs and SPANK plugins, and of connections and processes that end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from cadenza.policies.core.model import JobKey
from cadenza.policies.core.text import printable
from cadenza.sidecar import wire
from cadenza.sidecar.agent.errors import NotAuthorizedError, RefusedError
from cadenza.sidecar.agent.ipc.budgets import FileBudget, file_budget
from cadenza.sidecar.agent.ipc.messages import (
    Arrived,
    Ask,
    Attach,
    Checkpointed,
    Detach,
    End,
    Message,
    RequeuedBy,
    Restored,
    Resumed,
    Spilled,
    Start,
    Unready,
    Unrestored,
    Yielded,
    parse,
)
from cadenza.sidecar.agent.ipc.pages import Page
from cadenza.sidecar.agent.ipc.processes import start_ticks
from cadenza.sidecar.agent.ipc.transport import Session
from cadenza.sidecar.agent.jobs import shm_cleanup
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.jobs.job_run import JobRun, Rank, Waiter
from cadenza.sidecar.agent.leases import membership
from cadenza.sidecar.agent.leases.book import Taken
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.turns.arbiter import Arbiter
from cadenza.sidecar.agent.turns.coordinator import StopCoordinator

log = logging.getLogger(__name__)

MIN_RANKS = 64
"""Ranks that each job may have on a host; one with more CPUs may have one on each."""
WAIT_REPLY_S = 2.0
"""Time between two replies to a waiting SPANK plugin."""
EMPTY_MANAGED_S = 1.0
EMPTY_S = 10.0
"""Time without a process after which a job without a batch script counts as gone. Between two sruns a managed job can
wait for its turn again; a job that did not opt in should not have to."""


@dataclass
class JobHandler:
    """The jobs' half of the agent."""

    host: Host
    coordinator: StopCoordinator
    arbiter: Arbiter
    privileged: frozenset[int]
    """Uids that may register and end jobs."""
    watch: Callable[[int], None]
    """Called with each pid whose end matters."""
    files: FileBudget = field(default_factory=file_budget)

    def handle(self, session: Session, packet: bytes) -> None:
        """Act on one packet; a packet with any fault is answered by ``error`` and does no harm."""
        try:
            message = parse(packet)
            match message:
                case Start():
                    self._start(session, message)
                case End():
                    self._end(session, message)
                case Ask():
                    self._ask(session, message)
                case Attach():
                    self._attach(session, message)
                case _:
                    self._from_rank(session, message)
        except (wire.WireError, RefusedError) as error:
            peer = session.peer
            reason = printable(str(error))
            log.warning(
                "refused pid=%d uid=%d JOBID=%s: %s", peer.pid, peer.uid, session.key, reason, extra={"uid": peer.uid}
            )
            self.host.outbox.post(session, "error", error=reason)

    def _from_rank(self, session: Session, message: Message) -> None:
        """Handle a message that only an attached rank may send."""
        lease = self.host.leases.get(session.key) if session.key else None
        rank = self.host.run(lease.key).ranks.get(session.peer.pid) if lease else None
        if lease is None or rank is None or rank.session is not session:
            raise RefusedError("this process has not attached, or its job has ended")
        match message:
            case Arrived():
                self.coordinator.arrived(lease, rank, message)
            case Yielded():
                self.coordinator.yielded(lease, rank, message)
            case Resumed():
                self.coordinator.resumes.resumed(lease, rank, message)
            case Checkpointed():
                self.coordinator.checkpointed(lease, rank, message)
            case Spilled():
                self.coordinator.saves.spilled(lease, rank, message)
            case Restored() | Unrestored():
                self._arrive(lease, rank, message)
            case Detach():
                self._detach(session, lease, rank, message)
            case Unready() | RequeuedBy():
                self._note_word(rank, message)

    def _note_word(self, rank: Rank, message: Unready | RequeuedBy) -> None:
        """Note what a rank says of itself, for the report."""
        if isinstance(message, Unready):
            rank.unready = message.reason
        else:
            rank.requeue_owner = message.owner

    # --- registration --------------------------------------------------------------------------------------

    def _start(self, session: Session, message: Start) -> None:
        """Register a job; the answer follows as soon as it holds its lease, in this pass if its GPUs are free."""
        self._require_privilege(session, "start")
        if message.lane > 0 and not message.managed:
            reason = f"job {message.job} does not share: exclusive use of GPUs needs lane 0, not lane {message.lane}"
            log.warning("refused JOBID=%d: %s", message.job, reason)
            self.host.outbox.post(session, "lease", state="giveup", reason=reason)
            return
        # The peer is a task before its exec (slurm_spank_task_init_privileged): its parent is the step's slurmstepd.
        lease = self._registered(message)
        if membership.enroll(lease, session.peer.pid, batch=message.batch):
            self.host.leases.touch()
        self.watch(session.peer.pid)
        run = self.host.run(lease.key)
        run.empty_since = None
        if lease.state == "held" or lease.unasked:
            self.host.outbox.post(session, "lease", state="late" if lease.unasked else "granted")
            return
        now = self.host.clock.monotonic()
        session.key, session.joined = lease.key, True
        run.waiters.append(Waiter(session, now + self.host.settings.expert.lease_wait_s, now))

    def _require_privilege(self, session: Session, what: str) -> None:
        """Raise NotAuthorizedError unless the peer may register jobs."""
        if session.peer.uid not in self.privileged:
            raise NotAuthorizedError(f"{what}: uid {session.peer.uid} may not, only root's plugin may")

    def _registered(self, message: Start) -> Lease:
        """Return the job's lease, new or brought up to date."""
        # Slurm tells the restart to the batch step alone; the others have it from the prolog, which slurmd does not run
        # where a job is requeued as slurmctld starts. A job that has a later start on this node is that start's.
        here = [one for one in self.host.leases if one.job == message.job and one.node == message.node]
        later = next((one for one in here if one.restart > message.restart), None)
        lease = later or self.host.leases.get(JobKey(message.job, message.restart))
        if lease is not None and lease.uid != message.uid:
            log.warning("registered anew JOBID=%s uid=%d, was %d", lease.key, message.uid, lease.uid)
            self.drop(lease, "Slurm gave its number to another user's job")
            lease = None
        if lease is not None and lease.node not in ("", message.node):
            # A slurmctld that was killed forgets that it has started a job, and starts it again elsewhere.
            self.drop(lease, f"Slurm has started it again, on {message.node}")
            lease = None
        if lease is None:
            fresh = Lease(message.job, message.restart, message.uid, message.gpus, 0.0)
            fresh.managed = message.managed
            fresh.early = self.host.early.get(message.job, "")
            fresh.late = message.late and message.managed and message.hosts <= 1 and not fresh.early
            lease = self.host.leases.register(fresh, self.host.clock.now())
            log.info("registered JOBID=%s uid=%d gpus=%s", lease.key, lease.uid, lease.gpus)
        elif self.host.fact_of(lease) is None:  # the prolog's file does not have the flag
            lease.managed = message.managed
        lease.user, lease.node, lease.lane = message.user, message.node, message.lane
        lease.hosts, lease.options = max(message.hosts, 1), message.options
        lease.cpus, lease.memory_mb = message.cpus or lease.cpus, message.memory_mb or lease.memory_mb
        self.host.leases.touch()
        return lease

    def _end(self, session: Session, message: End) -> None:
        """Forget a job that has left the host."""
        self._require_privilege(session, "end")
        for lease in self.host.leases:
            here = "" in (message.node, lease.node) or message.node == lease.node
            if here and lease.job == message.job and message.restart in {None, lease.restart}:
                lease.processes = ()  # the epilog runs when none is left (prolog_epilog.html)
                self.drop(lease, "ended")

    def _ask(self, session: Session, message: Ask) -> None:
        """Let a process of a job wait for the job's lease, which it needs before it uses a GPU."""
        lease = self._own_lease(session, message)
        run = self.host.run(lease.key)
        self._note_request(lease)
        if lease.state == "held":
            self.host.outbox.post(session, "lease", state="granted")
            return
        others = [waiter for waiter in run.waiters if waiter.session is not session]
        if len(others) >= _max_ranks(lease):
            raise RefusedError(f"ask: {len(others)} processes of job {lease.key} wait already, as many as may")
        session.key, session.joined = lease.key, True
        run.waiters = [*others, Waiter(session, inf, self.host.clock.monotonic())]

    def _note_request(self, lease: Lease) -> None:
        """Have a job that started without its lease take turns from now on."""
        if lease.late:
            self.host.leases.ask(lease, self.host.clock.now())
            log.info("asks for its lease JOBID=%s gpus=%s", lease.key, lease.gpus)

    def _attach(self, session: Session, message: Attach) -> None:
        """Take in one rank; its identity comes from the kernel, not from the message."""
        lease = self._own_lease(session, message)
        run = self.host.run(lease.key)
        self._note_request(lease)
        # Forget an earlier attach of the same process.
        old = run.ranks.pop(session.peer.pid, None)
        if old is not None:
            old.page.close()
            if run.resume is not None:
                run.resume.leave(old.pid)
            if old.session is not None and old.session is not session:
                self.host.outbox.post(old.session, "error", last=True, error="replaced by a later attach")
        if not lease.occupying and not self.arbiter.up_to_date:
            self.arbiter.settle()  # the answer says whether it has a lease; no message goes before it without the rank
        page = self._new_page(run, lease)
        page.start_at(message.step)
        rank = run.ranks[session.peer.pid] = Rank(session, session.peer.pid, message, page)
        rank.requeue_owner = message.requeue_owner
        session.key, session.joined = lease.key, True
        run.detached, run.empty_since = None, None
        if membership.add(lease, rank.pid):
            self.host.leases.touch()
        self.watch(rank.pid)
        state = "held" if lease.occupying or message.in_step else "yielded"
        reason = "" if lease.occupying else self.arbiter.waiting_reason(lease)
        receipt = self.host.receipt_fields(run, message.rank)
        self.host.outbox.post(
            session, "attached", fds=(page.fd,), state=state, rank=message.rank, reason=reason, receipt=receipt
        )
        log.info("attached JOBID=%s rank=%d pid=%d lease=%s", lease.key, message.rank, rank.pid, lease.state)
        self.coordinator.joined(lease, rank)

    def _new_page(self, run: JobRun, lease: Lease) -> Page:
        """Return the page of one more rank; raise RefusedError beyond the job's number, or the agent's files."""
        most = _max_ranks(lease)
        if len(run.ranks) >= most:
            raise RefusedError(f"attach: job {lease.key} has {most} ranks on this host already, as many as it may")
        try:
            return Page(self.files)
        except OSError as error:
            raise RefusedError(f"attach: the agent has no file for its page: {error.strerror or error}") from None

    def _own_lease(self, session: Session, message: Attach | Ask) -> Lease:
        """Return the lease that root registered for the peer's job; raise NotAuthorizedError if it has none.

        The message says which job it is; that the process is one of it must be seen.
        """
        key, peer = JobKey(message.job, message.restart), session.peer
        kind = type(message).__name__.lower()
        lease = self.host.leases.get(key)
        if lease is None:
            raise NotAuthorizedError(f"{kind}: job {key} is not registered on this host; root's plugin does that")
        if lease.uid != peer.uid:
            raise NotAuthorizedError(f"{kind}: job {key} is uid {lease.uid}'s, not uid {peer.uid}'s")
        if not membership.belongs(peer.pid, lease):
            raise NotAuthorizedError(f"{kind}: pid {peer.pid} is no process of job {key}")
        return lease

    def _arrive(self, lease: Lease, rank: Rank, message: Restored | Unrestored) -> None:
        """Note how a rank of a moved job goes on; if one trains without its checkpoint, the job is not moved again."""
        run, number = self.host.run(lease.key), rank.hello.rank
        if isinstance(message, Restored):
            run.arrived.add(number)
            log.info("restored JOBID=%s rank=%d step=%d: %s", lease.key, number, message.step, message.path)
        elif not run.unrestored:
            run.unrestored = run.note = f"rank {number}: {message.reason or 'it has not restored its checkpoint'}"
            log.warning("unrestored JOBID=%s %s; it is not moved again", lease.key, run.unrestored)

    def _detach(self, session: Session, lease: Lease, rank: Rank, message: Detach) -> None:
        """Record that a rank will not stop any more; a stop that has not been committed is withdrawn."""
        run = self.host.run(lease.key)
        reason = f"rank {rank.hello.rank} has detached" + (f": {message.reason}" if message.reason else "")
        self.coordinator.ends.withdraw(lease, "refused", reason)
        self._forget_rank(lease, run, rank)
        run.detached = reason
        session.key = None

    # --- endings -------------------------------------------------------------------------------------------

    def lost(self, session: Session) -> None:
        """Record that a connection ended; its process may still run."""
        run = self.host.jobs.get(session.key) if session.key else None
        if run is None:
            return
        run.waiters = [waiter for waiter in run.waiters if waiter.session is not session]
        rank = run.ranks.get(session.peer.pid)
        if rank is not None and rank.session is session:
            rank.session, rank.arrived = None, None
            if start_ticks(rank.pid) is None:
                self.process_gone(rank.pid)

    def process_gone(self, pid: int) -> None:
        """Remove a process that ended from its job, and the job from the leases if it was the last."""
        for lease in self.host.leases:
            if any(process.pid == pid for process in lease.processes):
                with self.host.supervise(lease.key, "the end of a process"):
                    run = self.host.run(lease.key)
                    run.batch_ended |= any(process.batch for process in lease.processes if process.pid == pid)
                    lease.processes = tuple(process for process in lease.processes if process.pid != pid)
                    self.host.leases.touch()
                    if rank := run.ranks.get(pid):
                        self._forget_rank(lease, run, rank)
                    if not lease.processes:
                        run.empty_since = self.host.clock.monotonic()
                        if run.batch_ended:
                            self.drop(lease, "its batch script ended")

    def _forget_rank(self, lease: Lease, run: JobRun, rank: Rank) -> None:
        """Take a rank out of its job and out of a resume under way."""
        run.ranks.pop(rank.pid, None)
        rank.page.close()
        self.coordinator.resumes.left(lease, rank.pid)

    def drop(self, lease: Lease, reason: str) -> None:
        """Forget a job."""
        run = self.host.jobs.pop(lease.key, None)
        stretch = self.host.leases.drop(lease, self.host.clock.now())
        if stretch is not None:
            self.host.report_stretch(stretch)
        for rank in run.ranks.values() if run else ():
            rank.page.close()
            self.host.outbox.post(rank.session, "error", last=True, error=f"job {lease.key} has left: {reason}")
        for waiter in run.waiters if run else ():
            self.host.outbox.post(waiter.session, "lease", last=True, state="giveup", reason=reason)
        log.info("left JOBID=%s: %s", lease.key, reason)
        others = any(other.job == lease.job for other in self.host.leases)
        if not others and lease.state != "waiting":
            # Keep the GPUs of a job that has left from others while processes of it live on, as after a failed kill.
            now = self.host.clock.monotonic()
            for pid in sorted(membership.pids_of(lease)):
                if (ticks := start_ticks(pid)) is not None:
                    self.host.taken.append(Taken(pid, ticks, frozenset(lease.gpus), lease.job, now))
        if not others and not lease.running_processes(start_ticks):
            # A process that was killed removes nothing, and /dev/shm is the host's memory.
            shm_cleanup.remove_soon(lease.uid, lease.job)

    # --- timers --------------------------------------------------------------------------------------------

    def drop_gone(self) -> None:
        """Forget jobs that have left without a message."""
        now = self.host.clock.monotonic()
        for lease in self.host.leases:
            with self.host.supervise(lease.key, "its end"):
                if reason := self._gone_reason(lease, self.host.run(lease.key), now):
                    self.drop(lease, reason)

    def reply_to_waiters(self) -> None:
        """Tell waiting plugins that they still wait, or that they have waited too long."""
        now, limit = self.host.clock.monotonic(), self.host.settings.expert.lease_wait_s
        for lease in self.host.leases:
            run = self.host.run(lease.key)
            for waiter in tuple(run.waiters):
                reason = self.arbiter.waiting_reason(lease)
                # A wait for host memory has no end: after a requeue its place would be behind those that came later. A
                # job of several hosts does give up, because two of them may wait for each other.
                if lease.hosts == 1 and self.host.awaits_memory(lease):
                    waiter.deadline = max(waiter.deadline, now + limit)
                if lease.state == "held":
                    self.host.outbox.post(waiter.session, "lease", state="granted")
                    run.waiters.remove(waiter)
                elif now >= waiter.deadline:
                    reason = f"no lease within {limit:g} s: {reason}"
                    log.warning("gave up JOBID=%s: %s", lease.key, reason)
                    self.host.outbox.post(waiter.session, "lease", state="giveup", reason=reason)
                    run.waiters.remove(waiter)
                elif now >= waiter.next_reply_at:
                    self.host.outbox.post(waiter.session, "lease", state="wait", reason=reason)
                    waiter.next_reply_at = now + WAIT_REPLY_S

    def _gone_reason(self, lease: Lease, run: JobRun, now: float) -> str | None:
        """Return the reason why a job counts as gone without a message; None while it does not."""
        if lease.processes:
            run.empty_since = None
            return None
        if run.empty_since is None:
            run.empty_since = now
        if run.listed and self.host.fact_of(lease) is None:
            return "Slurm does not list it any more and none of its processes lives"
        limit = EMPTY_MANAGED_S if lease.managed else EMPTY_S
        return f"none of its processes has lived for {limit:g} s" if now - run.empty_since > limit else None


def _max_ranks(lease: Lease) -> int:
    """Return the number of processes of a job that may have a connection here, of one kind."""
    return max(MIN_RANKS, int(lease.cpus))
