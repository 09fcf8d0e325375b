"""One rank's side of the yield protocol: attach, stop at a boundary, wait for the lease, resume."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cadenza.sidecar import wire
from cadenza.sidecar.client.clock import monotonic_ns
from cadenza.sidecar.client.errors import ClientError, MoveError, NoRoomError, RestoreError, UsageError
from cadenza.sidecar.client.offload.held_signals import HeldSignals
from cadenza.sidecar.client.offload.pin_threads import pinning_paused
from cadenza.sidecar.client.session import checkpoint_request, identity, lease_request, nccl_watchdog, resources
from cadenza.sidecar.client.session.agent_link import Link, Message, Reply
from cadenza.sidecar.client.session.arrival import Arrival
from cadenza.sidecar.client.session.communicators import Communicators
from cadenza.sidecar.client.session.prefetch_hints import FileList
from cadenza.sidecar.client.session.save_points import SavePoints
from cadenza.sidecar.client.session.savers import BEFORE_NEXT_BATCH, Collected, Place, Question, Registration, Savers
from cadenza.sidecar.client.session.step_page import STOP, StepCounters, gpu_memory, private_page
from cadenza.sidecar.client.session.summary import Summary

if TYPE_CHECKING:
    from cadenza.sidecar.client.offload.engine import Moved, Offload
    from cadenza.sidecar.client.offload.process_look import ProcessLook
    from cadenza.sidecar.client.offload.storages import Survey

RESTORE_RETRIES = 20
RESTORE_RETRY_S = 0.5
"""Number of retries while the GPU is too full for the state, and the seconds between them; then the agent hears it."""
FAILURES_BORNE = 120
"""Failures in a row of a GPU after which a rank ends, because the others have their state back and wait for it; by then
the service has requeued a job that can be."""
LOOK_NS = 50_000_000
"""Time between two looks at the job's resources, which are one read of memory."""
VERDICT_S = 300.0
"""Longest wait of a rank at its boundary for the agent's decision, in seconds; then it continues."""
PATHS_NS = 600_000_000_000
PATHS_LOOK_S = 0.1
"""Longest wait of a rank for the checkpoint that another one writes, in ns, and the seconds between two looks."""
MAX_NAMES = 32
MAX_NAME = 300
MAX_TEXT = 2000
"""Bounds of a message's list of storages that stay, of one entry, and of an error text."""
STATE_NAMES = {wire.STATE_RUNNING: "running", wire.STATE_ARRIVED: "running", wire.STATE_YIELDED: "yielded"}
"""State sent by a reconnecting rank; one that had arrived, and was not committed, continues and is running."""

_log = logging.getLogger("cadenza.client")
_sessions = itertools.count(1)
"""Numbers of this process's sessions that an agent knows; each rank of a job counts the same ones."""


class Session(StepCounters):
    """One attached rank: ``step`` counts its boundaries, ``active`` is true while an agent may stop it."""

    def __init__(self) -> None:
        super().__init__(private_page())
        self.automatic = False
        """The optimizer hook attached it and calls its boundaries; an explicit attach() ends that."""
        self.explicit = False
        """The script called attach(); a script that only keeps checkpoints has a session too."""
        self.refuse_resident = False
        self.everything = False
        """All tensors on the GPU that Python can see move too."""
        self.addresses_stay = False
        """Device addresses stay at a yield, where the library for it was preloaded."""
        self.spill_to = ""
        """A directory on a disk of this node for state that does not fit into host memory; "": none."""
        self.files = FileList()
        """Files that this process will read again when it starts on another host; see ``FileList.name``."""
        self.looks: list[Callable[[], object]] = []
        """Functions to call at training boundaries now and then: where memory is sampled, outside the hot loop."""
        self._sources: list[tuple[str, object]] = []
        self._before_offload: list[Callable[[], object]] = []
        self._after_restore: list[Callable[[], object]] = []
        self._savers = Savers(self._savers_changed)
        self.save_points = SavePoints(self._savers, lambda: [thing for _, thing in self._sources])
        self._told_unready = ""
        self._at_own_save = False
        self._awaits_batch = False
        """The last training boundary was a save point, but for the rest of its step; see ``next_batch``."""
        self.arrival = Arrival(self._send, self._sample_next)
        """The way of a moved job to its next GPUs: what comes back is what went away."""
        self._summary = Summary(self.arrival)
        self._unsaved = ""
        """Why no checkpoint can be saved where this rank has yielded; "" if one can."""
        self._deferred_checkpoint: tuple[Link, int, int, Collected] | None = None
        """A requested checkpoint that frameworks save after the boundary: link, order, losses, what is saved."""
        self._link: Link | None = None
        self._offload: Offload | None = None
        self._looked_ahead: ProcessLook | None = None
        """The look at the process at the boundary before a stop's."""
        self._survey_s = 0.0
        """Time that the last survey took, while the job stood."""
        self._communicators = Communicators(0)
        self._state = wire.STATE_RUNNING
        self._who: identity.Identity | None = None
        self._cancelled = 0
        self._looked_ns, self._looked_step = self.last_ns, 0
        self._look_step, self._sample_step = 0, 0
        """Steps of the next look at the job's resources, and of the next sample."""
        self._without_lease = False
        self._pause = threading.Event()
        self._requeue_owner = identity.requeue_owner(os.environ)

    @property
    def active(self) -> bool:
        """True while this process takes turns; False outside Slurm, without an agent and after detach()."""
        return self._link is not None

    @property
    def who(self) -> identity.Identity | None:
        """The job's rank that this process is; None before it has attached."""
        return self._who

    @property
    def local_ranks(self) -> int:
        """Number of the job's ranks that share this node's CPUs and caches."""
        return (self._who.local_world_size if self._who else None) or resources.local_ranks()

    @property
    def gpus(self) -> int:
        """Number of GPUs of the whole job, if each of its nodes has as many as this one; 0 outside a Slurm job."""
        who = self._who or identity.here()
        return len(who.gpus) * who.hosts if who else 0

    def tuning(self) -> resources.Tuning | None:
        """Return the CPUs and the cache budget of the whole job on this node; None before the agent wrote them."""
        return resources.read(self.words)

    def requeued_by(self, owner: str) -> None:
        """Tell the agent that ``owner``, such as ``lightning``, requeues this job, so that Cadenza does not."""
        self._requeue_owner = owner
        if self._link:
            self._link.send("requeued_by", owner=owner)

    def restored(self, path: object, step: int) -> None:
        """Say that this rank goes on from a checkpoint that the script has loaded by itself; before the first boundary.

        Every rank of a job that comes back after a move says so, or a keeper or a callback of Cadenza's does; one that
        trains without is reported, and its job is not moved again. ``path`` is what was saved on request, or a later
        checkpoint of the same job.
        """
        self.arrival.restored(path, step)

    def _send(self, kind: str, **fields: Any) -> bool:
        """Send a message to the agent; return False without one."""
        return self._link is not None and self._link.send(kind, **fields)

    def _sample_next(self) -> None:
        """Have the next training boundary take a sample, which is off the step path."""
        self.memory_step = 0

    def sample_memory(self) -> None:
        """Follow the job's resources, and when a sample is due do all that does not belong on the step path."""
        resources.update_all()
        since_ns, self._looked_ns = self.last_ns - self._looked_ns, self.last_ns
        steps, self._looked_step = self.step - self._looked_step, self.step
        if self.memory_step != self._look_step or self.step >= self._sample_step:
            self._sample()
            self._sample_step = self.memory_step
        # A job's CPUs may change in mid-training, also a slow one's.
        ahead = max(1, LOOK_NS * steps // max(1, since_ns))
        self.memory_step = self._look_step = min(self._sample_step, self.step + ahead)
        # Before a stop, the process is looked at: there the GPU still has work.
        stop = self.words[STOP]
        if stop == self.step + 1 and self.words[wire.PAGE_PURPOSE] == wire.PURPOSE_YIELD:
            if self.active and self._sources and gpu_memory():
                from cadenza.sidecar.client.offload.process_look import ProcessLook  # noqa: PLC0415

                self._looked_ahead = ProcessLook.ahead()
        elif stop > self.step:
            self.memory_step = self._look_step = min(self.memory_step, stop - 1)

    def _sample(self) -> None:
        """Record GPU memory, and serve everything that waits for a boundary."""
        super().sample_memory()
        self.arrival.at_boundary()
        if self._savers:
            self.files.publish()
            samples = self._savers.able == wire.SAVES_AWAY or self.save_points.on_sample
            if samples and self.save_points.sample():
                self.memory_step = self.step + 1
        self._pin_ahead()
        _call_all((*self.looks,))

    def _heed(self, message: Message) -> bool:
        """Take in a message of the agent, in the link's thread; return True if no boundary waits for it.

        The boundary before a stop looks at the process, see ``sample_memory``.
        """
        if message["type"] == "stop" and isinstance(step := message.get("step"), int):
            self.memory_step = min(self.memory_step, step - 1)
        return self.arrival.heed(message)

    def register(self, name: str, thing: object) -> None:
        """Add state that moves when the job yields.

        It is a tensor, module, optimizer, scaler, container of these, any object with them as attributes,
        or a function that returns one of these whenever it is called.
        """
        if not any(thing is existing for _, existing in self._sources):
            self._sources.append((name, thing))

    def call(
        self,
        *,
        on_yield: Callable[[], object] | None = None,
        on_resume: Callable[[], object] | None = None,
        on_checkpoint: checkpoint_request.Saver | None = None,
    ) -> None:
        """Register functions to call around each yield, for other GPU memory of the process, and to save.

        ``on_yield`` runs before the state leaves; when it raises, the job does not yield. ``on_resume`` runs once
        the state is back. ``on_checkpoint`` runs on every rank at the same boundary when Cadenza wants to requeue
        the job. It returns a path, or a ``checkpoint_request.Saved``, once a checkpoint is complete on the disk;
        it raises when that is impossible; or it returns ``checkpoint_request.DEFERRED`` and ``checkpointed()`` is
        called later. Each ``on_checkpoint`` is one more: the job is requeued once all of them have saved.
        """
        self._before_offload += [on_yield] if on_yield else []
        self._after_restore += [on_resume] if on_resume else []
        if on_checkpoint is not None:
            self.add_saver(on_checkpoint)

    def add_saver(
        self,
        save: checkpoint_request.Saver,
        may: Question = Place.obstacle,
        *,
        holds: object = (),
        away: bool = False,
        unready: str = "",
    ) -> Registration:
        """Add a function that saves a checkpoint on request; without one, the agent does not ask for any.

        ``may`` is asked at each boundary, while one is requested, whether it can be taken there; by default it is at
        the end of a training step. ``holds`` is what it saves, or a function that returns it: gradients of its
        optimizers, else of its modules, are then not left behind. ``away``: it can also save while the state is in host
        memory, where torch reads the host copy. All savers of a session must succeed. ``unready`` is the reason why
        nothing can be saved yet; the registration that is returned tells when that changes, and can be withdrawn.
        """
        if "torch" in sys.modules:
            from cadenza.sidecar.client.session import compiled_steps  # noqa: PLC0415

            compiled_steps.prepare_to_follow()
        return self._savers.add(save, may, holds, away=away, unready=unready)

    def own_save(self, registration: Registration, saved: checkpoint_request.Saver) -> None:
        """End a save that the script made by itself; ``saved`` returns what was saved, complete on the disk.

        Every rank calls it after every save of its own, where checkpoints can be taken only at such saves. It is a
        boundary without training: if one is requested, the other savers save too, and the job waits for its requeue.
        """
        self.words[wire.PAGE_SAVE_EVERY] = self.save_points.saved(registration, saved, self.trained)
        self._at_own_save = True
        try:
            self.boundary(training=False)
        finally:
            self._at_own_save = False

    def checkpointed(self, path: str = "", step: int | None = None, error: str = "", lost_s: float = 0.0) -> None:
        """Report that the checkpoint promised by ``checkpoint_request.DEFERRED`` is complete; wait for the requeue.

        Returns as if nothing had happened when the job is not requeued after all, and at once when no checkpoint
        was requested, when another one was promised too, or when ``error`` says why it could not be saved.
        """
        deferred = self._deferred_checkpoint
        if deferred is None:
            return
        link, order, since, collected = deferred
        saved = checkpoint_request.Saved(self.step if step is None else step, path=path, lost_s=lost_s)
        collected.keep(error or checkpoint_request.call(lambda: saved, self.step))
        if not collected.promised:
            self._deferred_checkpoint = None
            self._await_requeue(link, order, since, collected)

    def connect(self, path: str, who: identity.Identity) -> None:
        """Present this rank to the agent; without the lease, move the state out and wait here for it.

        Raises AgentRefusedError when the agent does not accept this process.
        """
        self._who = who
        # The keys in the ranks' store stay there, and a second session (Lightning's fit, then test) counts its steps
        # from 0 again: without a number of its own it would find the verdicts of the first.
        self._communicators = Communicators(next(_sessions))
        resources.set_source(self)
        self.arrival.begin(who)
        self._summary.begin(who, os.environ)
        link = Link(path, self._greeting, self.words, self._heed)
        reply = link.open()
        self._link = link
        if reply:
            self._adopt(reply)
            if self._without_lease:
                _log.warning("%s", lease_request.waiting_text(who, reply.reason))
                self._stand(self._wait_for_lease, link, 0)
            self.restart_clock()

    def await_state(self) -> None:
        """Wait for the lease and the state if an exception left the state out; else return at once."""
        if self.out:
            self.on_stop_step()
            self.restart_clock()

    def detach(self) -> None:
        """Leave: this process is not stopped any more. Raises UsageError while the state is away."""
        if self._state == wire.STATE_YIELDED:
            raise UsageError("detach() while this job's state is in host memory: wait for its lease first")
        link, self._link = self._link, None
        self._sources.clear()
        self._before_offload.clear()
        self._after_restore.clear()
        self._savers.clear()
        self.save_points.close()
        self.arrival.end()
        if self._offload is not None:
            self._offload.close()
            self._offload = None
        self.files.close()
        self.words = private_page()
        if link:
            link.send("detach")
            link.close()

    def abandon(self) -> None:
        """Become inert in a forked child: the session and its page belong to the parent."""
        link, self._link = self._link, None
        self.words = private_page()
        if link:
            link.abandon()

    def on_stop_step(self) -> None:
        """Act on the page's stop step (the slow path of a boundary): yield, save, or wait for the lease."""
        link = self._link
        if self.training and self.trained:
            self.arrival.at_boundary()
        if link is None:
            self.words[STOP] = 0
            return
        # A lost agent cannot withdraw its order, and each boundary would come by here.
        if not link.alive or self._state == wire.STATE_YIELDED:
            self.words[STOP] = 0
        if reply := link.take_reply():
            self._adopt(reply)
        if self._deferred_checkpoint is not None:  # one that is complete by now is reported here
            _call_all((*self.looks,))
        order = self.words[wire.PAGE_ORDER]
        if self._without_lease or self._state == wire.STATE_YIELDED:
            self._stand(self._wait_for_lease, link, order)
        elif 0 < self.words[STOP] <= self.step and link.alive and order != self._cancelled:
            saves = self.words[wire.PAGE_PURPOSE] == wire.PURPOSE_CHECKPOINT
            # Also while it is decided: a rank of which the agent sees nothing at its stop step for 20 ms has slipped
            # past it, and the stop step moves on, at each boundary anew where the decision takes that long.
            self._set_state(wire.STATE_ARRIVED)
            if saves and self.training and not self._savers.able:  # no look may have come before this boundary
                _call_all((*self.looks,))
            if saves and self._savers.able and self._passes(order):
                return
            self._stand(self._save_checkpoint if saves else self._yield, link, order)

    def _stand(self, stop: Callable[[Link, int], None], link: Link, order: int) -> None:
        """Carry out a stop at this boundary; an exception from a signal handler may leave it."""
        try:
            stop(link, order)
        except BaseException:
            # State of the CPU comes back first. Device state stays away, because another job may have the device; the
            # next boundary waits again.
            if self._offload and self._offload.away and not self._offload.needs_gpu:
                with contextlib.suppress(RestoreError):
                    self._offload.restore()
            raise
        finally:
            if self._state == wire.STATE_ARRIVED:
                self._set_state(wire.STATE_RUNNING)

    def _passes(self, order: int) -> bool:
        """Return True if this boundary is no save point, and say so in the page: the training goes on."""

        def pending() -> bool:
            return bool(self.words[STOP]) and self.words[wire.PAGE_ORDER] == order != self._cancelled

        passed = 1
        try:
            passed = self.save_points.passes(self.trained, order, pending, self._place)
            self.words[wire.PAGE_PASSED] = max(0, passed)
            if passed == BEFORE_NEXT_BATCH and not self._awaits_batch:
                # The rest of the step, such as an evaluation, comes first: ``next_batch`` goes on here.
                self._awaits_batch = True
                return True
            if self.training:  # no batch was asked for since the last step
                self._awaits_batch = False
        finally:
            if passed > 0 and not self._awaits_batch:
                self._set_state(wire.STATE_RUNNING)
        if passed <= 0:
            self.save_points.over()
        return passed > 0

    def next_batch(self) -> None:
        """Save the checkpoint that is requested, if the last boundary was a save point: the step is over now.

        A loader whose position is saved calls it before it hands out a batch.
        """
        if not self._awaits_batch:
            return
        self._awaits_batch = False
        link, order, began = self._link, self.words[wire.PAGE_ORDER], monotonic_ns()
        due = 0 < self.words[STOP] <= self.step and self.words[wire.PAGE_PURPOSE] == wire.PURPOSE_CHECKPOINT
        if link is not None and link.alive and due and order != self._cancelled:
            self.save_points.over()
            self.words[wire.PAGE_PASSED] = 0
            self._stand(self._save_checkpoint, link, order)
            self.last_ns += monotonic_ns() - began
        elif self._state == wire.STATE_ARRIVED:
            self._set_state(wire.STATE_RUNNING)

    def _place(self, **known: Any) -> Place:
        """Return this boundary as savers see it."""
        own = self.save_points.own(self.trained) if self._at_own_save else None
        return Place(training=self.training, in_step=self.automatic, own=own, **known)

    def _count_other_step(self) -> None:
        """End a step without training: a save of the script, or a batch of an evaluation."""
        if not self._at_own_save:
            self.save_points.evaluated(self.sum_ns, lambda: self.trained)
        super()._count_other_step()

    @pinning_paused()
    def _yield(self, link: Link, order: int) -> None:
        """Carry out an order to yield; return once the job has its lease back, or at once if it does not yield."""
        since = link.losses
        # 1. Survey the state that would move, and the host memory that it needs.
        survey = self._survey()
        self._note_place()
        self.order_arrived()
        # 2. Report that this rank stands at its boundary; a refusal cancels the order for all ranks.
        refused = (survey.refusal or "")[:MAX_TEXT] if survey else ""
        nbytes = max(0, survey.host_bytes - self._offload.host_bytes) if survey and self._offload else 0
        sizes = {}
        if survey and self._offload and not refused:
            held, stays = self._offload.held_and_staying(survey.segments, all_moves=survey.in_place is not None)
            sizes = {"held_bytes": held, "stays_bytes": stays}
        link.send("arrived", since=since, order=order, step=self.step, bytes=nbytes, refused=refused, **sizes)
        # 3. Wait until the agent has heard of all ranks, and commits.
        if not self._await_commit(link, order, since):
            return
        # 4. Move the state to host memory, and report it: the agent can then give the GPUs to another job. One that
        #    comes back hears either "running" or "yielded".
        let_go = False
        with link.steady:
            if link.losses != since:
                return
            try:
                self._call_on_yield()
                let_go = True
                # Slurm's suspend may come as soon as this is reported. NCCL's watchdog must have seen the last
                # collective end by then: after the stop it would take it for one that hangs, and end the process.
                # A handler that raises between the copy and the record of it would leave tensors without memory.
                with HeldSignals():
                    quiet_at_ns = nccl_watchdog.quiet_at_ns()
                    self._communicators.suspend(str(self.step))  # an order has another number on each host
                    moved = self._offload_state(survey)
                    self._set_state(wire.STATE_YIELDED)
                    # The watchdog's time has mostly passed during the copy.
                    self._pause.wait(max(0, quiet_at_ns - monotonic_ns()) / 1e9)
                    self.order_done()
                    resident = map(str, survey.resident) if survey else ()
                    link.send("yielded", since=since, order=order, **self._moved_report(moved, resident))
            except ClientError as error:
                _log.warning("this job could not yield and continues: %s", error)
                self._cancelled = order
                text = str(error)[:MAX_TEXT]
                link.send("yielded", since=since, order=order, copy_s=0.0, bytes=0, error=text)
        if self._state != wire.STATE_YIELDED:
            self._communicators.resume()  # the other ranks come once the agent has told them to go on
            _call_all(self._after_restore if let_go else ())
            return
        # 5. Wait for the lease and bring the state back.
        self._resume(link)

    def _resume(self, link: Link) -> None:
        """Wait for the lease, through any loss of the agent, and bring the state back."""
        order, moved, failures, began = 0, None, 0, monotonic_ns()
        try:
            # 1. Wait for the lease, and bring the state back; where the GPU is too full, or fails, wait again.
            while True:
                # A signal handler may save in this wait: of tensors without memory torch.save() writes a file without
                # content, and raises nothing.
                with self.host_copies():
                    message = self._await_resume(link) or {}
                order, since = _order_of(message), link.losses
                if message.get("type") == "spill":
                    link.send("spilled", since=since, order=order, **self._spill())
                    continue
                try:
                    moved = self._restore_state(link)
                    # ncclCommResume waits for all ranks without a limit: none enters it before all have their state.
                    if not message.get("together") or self._await_others(link, order, since, moved):
                        break
                except RestoreError as error:
                    full = isinstance(error, NoRoomError)
                    reason = {"no_room" if full else "failed": str(error)[:MAX_TEXT]}
                    link.send("yielded", since=since, order=order, **reason, **_move_report(None, ()))
                    failures = 0 if full else failures + 1
                    if failures >= FAILURES_BORNE and self._who and self._who.world_size > 1:
                        raise
                    _log.warning("this job waits on with its state in host memory: %s", error)
                    self._pause.wait(RESTORE_RETRY_S)
        finally:
            # 2. Report, since other ranks may still wait for memory; then let NCCL and the script rebuild what they
            #    released, and follow the resources of this turn.
            if self._state == wire.STATE_RUNNING:
                link.send("resumed", since=link.losses, order=order, copy_s=moved.seconds if moved else 0.0)
                with HeldSignals():
                    self._communicators.resume()
                _call_all(self._after_restore)
                resources.update_all()
            self._summary.waited(began)

    def _restore_state(self, link: Link) -> Moved | None:
        """Bring the state back and run on; raise RestoreError with all still away, NoRoomError for a full GPU."""
        retries = 0
        while True:
            try:
                with HeldSignals(), link.steady:
                    here = self._offload if self._offload and self._offload.away else None
                    moved = here.restore(self._communicators.freed) if here else None
                    self._set_state(wire.STATE_RUNNING)
                    return moved
            except NoRoomError as error:
                # The other job on the GPU may still be moving out.
                if retries == RESTORE_RETRIES:
                    raise
                retries += 1
                _log.warning("this job's state cannot come back yet: %s", error)
                self._pause.wait(RESTORE_RETRY_S)

    def _await_others(self, link: Link, order: int, since: int, moved: Moved | None) -> bool:
        """Stand with the state back until that of the other ranks is; return False with it out again if one cannot.

        Then the agent gives the GPUs to another job. A rank that loses the agent, or cannot move out, runs on.
        """
        link.send("resumed", since=since, order=order, copy_s=moved.seconds if moved else 0.0, standing=True)
        while link.losses == since:
            message = link.receive() or {}
            if _order_of(message) == order and message["type"] == "commit":
                return True
            if _order_of(message) == order and message["type"] == "cancel":
                return not self._move_out_again(link, order, since)
        return True

    def _move_out_again(self, link: Link, order: int, since: int) -> bool:
        """Move the state out whose resume is withdrawn; return False with all in place if that fails."""
        survey = self._survey()
        with HeldSignals(), link.steady:
            if link.losses != since:
                return False
            try:
                if survey and survey.refusal:
                    raise MoveError(survey.refusal)
                report = self._moved_report(self._offload_state(survey), ())
                self._set_state(wire.STATE_YIELDED)
            except ClientError as error:
                report = {**_move_report(None, ()), "error": str(error)[:MAX_TEXT]}
            link.send("yielded", since=since, order=order, **report)
            return self._state == wire.STATE_YIELDED

    @property
    def away(self) -> bool:
        """True while the state is in host memory, or on a disk."""
        return self._offload is not None and self._offload.away

    def host_copies(self) -> contextlib.AbstractContextManager[object]:
        """Return a context in which torch reads the host copy of state that is away; no state is, no effect."""
        return self._offload.host_copies() if self._offload and self._offload.away else contextlib.nullcontext()

    def _await_resume(self, link: Link) -> Message | None:
        """Wait for ``resume`` or ``spill``; save checkpoints from the host copy when the agent asks for them."""
        with contextlib.ExitStack() as saved:
            while (message := link.receive()) and message["type"] not in ("resume", "spill"):
                if message["type"] == "save":
                    since, order = link.losses, _order_of(message)
                    answer = self._save_away()
                    self.arrival.leaves(order, answer)
                    link.send("checkpointed", since=since, order=order, **answer)
                    if not answer["error"]:
                        saved.enter_context(checkpoint_request.default_sigterm())
                    continue
                saved.close()
                if message["type"] == "attached" and (reply := link.take_reply()):
                    self._adopt(reply)
            return message

    def _save_away(self) -> Message:
        """Save a checkpoint from the host copy; return the fields of the answer."""
        if self._savers.able != wire.SAVES_AWAY:
            return checkpoint_request.failure(self.step, self._savers.refusal or "it saves only while it trains")
        if not self.trained or self._unsaved:
            return checkpoint_request.failure(self.step, self._unsaved or "it has not trained yet")
        began = monotonic_ns()
        collected = self._savers.save(self.step)
        if collected.promised and not collected.error:
            collected.keep("its framework saves only while it trains")
        if (path := collected.missing) and not (self._who and self._who.rank):
            collected.take(f"its saver returned {path}, which does not exist")
        return collected.fields((monotonic_ns() - began) * 1e-9)

    def _note_place(self) -> None:
        """Note whether the boundary at hand is a save point, before the state leaves."""
        passed = self._savers.able == wire.SAVES_AWAY and self.save_points.stands(self.trained, self._place)
        self._unsaved = wire.PASSED_WORDS[passed] if passed else ""

    def _spill(self) -> Message:
        """Move the state that is away from host memory to the disk; return the fields of the answer."""
        try:
            moved = self._offload.spill(self.spill_to) if self._offload and self._offload.away else None
        except MoveError as error:
            return {"error": str(error)[:MAX_TEXT]}
        return {"bytes": moved.nbytes, "seconds": moved.seconds} if moved else {}

    @pinning_paused()
    def _wait_for_lease(self, link: Link, order: int) -> None:
        """Move out the state that can be moved, because the job has no lease, and wait for it in any case."""
        self._without_lease = False
        if self._state == wire.STATE_YIELDED:  # the exception that ended the last wait may have met its end
            link.send("yielded", order=order, **_move_report(None, ()))
        else:
            with link.steady:
                since = link.losses
                survey = self._survey()
                self._note_place()
                moved, refusal = None, survey.refusal if survey else None
                try:
                    if not refusal:
                        self._call_on_yield()
                except ClientError as error:
                    refusal = str(error)
                with HeldSignals():
                    try:
                        moved = None if refusal else self._offload_state(survey)
                    except ClientError as error:
                        refusal = str(error)
                    self._set_state(wire.STATE_YIELDED)
                    resident = [refusal] if refusal else map(str, survey.resident if survey else ())
                    link.send("yielded", since=since, order=order, **self._moved_report(moved, resident))
            if refusal:
                _log.warning("waiting for the lease with this job's state still in place: %s", refusal)
        self._resume(link)

    def _save_checkpoint(self, link: Link, order: int) -> None:
        """Save a checkpoint once all ranks stand at this boundary, and wait to be requeued or sent on."""
        since, refused = link.losses, self._savers.refusal
        self.order_arrived()
        link.send("arrived", since=since, order=order, step=self.step, bytes=0, refused=refused[:MAX_TEXT])
        if refused or not self._await_commit(link, order, since):
            return
        self._cancelled = order  # no boundary arrives for it again while the page still names it
        began = monotonic_ns()
        collected = self._savers.save(self.step, self.save_points.own(self.trained))
        if collected.promised and not collected.error:
            self._deferred_checkpoint = (link, order, since, collected)
        else:
            self._await_requeue(link, order, since, collected, (monotonic_ns() - began) * 1e-9)

    def _await_requeue(self, link: Link, order: int, since: int, collected: Collected, seconds: float = 0.0) -> None:
        """Report a checkpoint; after a good one wait until ``cancel``, a loss of the agent or the time limit."""
        if not self._await_paths(link, order, since, collected):
            return
        self.order_done()
        answer = collected.fields(seconds)
        self.arrival.leaves(order, answer)
        link.send("checkpointed", since=since, order=order, **answer)
        if answer["error"]:
            return
        with checkpoint_request.default_sigterm():
            while link.losses == since:
                message = link.receive(VERDICT_S)
                if message is None or self._ends_stop(message, order):
                    self.arrival.stays(order, (message or {}).get("reason"))
                    return

    def _await_paths(self, link: Link, order: int, since: int, collected: Collected) -> bool:
        """Make a checkpoint that is not where its saver says a failure; return False if the stop ends before.

        Often rank 0 alone writes, and the others, which do nothing, are done before there is anything.
        """
        limit_ns = monotonic_ns() + (PATHS_NS if self._who and self._who.rank else 0)
        while path := collected.missing:
            if monotonic_ns() >= limit_ns:
                collected.take(f"its saver returned {path}, which does not exist")
                return True
            message = link.receive(PATHS_LOOK_S)
            if link.losses != since or (message is not None and self._ends_stop(message, order)):
                return False
        return True

    def _await_commit(self, link: Link, order: int, since: int) -> bool:
        """Wait for the agent's decision about an order; return True to carry it out, False to continue."""
        while link.losses == since:
            message = link.receive(VERDICT_S)
            if message is None:
                text = f"step {self.step}: no answer for {VERDICT_S:.0f} s, continuing"
                link.send("arrived", since=since, order=order, step=self.step, bytes=0, refused=text)
                self._cancelled = order
                return False
            if self._ends_stop(message, order):
                return False
            if _order_of(message) == order and message["type"] == "commit":
                link.forget()
                return True
        return False

    def _ends_stop(self, message: Message, order: int) -> bool:
        """Return whether a message ends the stop at this boundary: a later order, ``cancel``, or a later step."""
        if _order_of(message) != order:
            return _order_of(message) > order
        if message["type"] == "cancel":
            self._cancelled = order
            return True
        return bool(message["type"] == "stop" and message.get("step", 0) > self.step)

    def _survey(self) -> Survey | None:
        """Check the storages of all registered state; return None when this process has no torch state at all."""
        if not self._sources or "torch" not in sys.modules:
            return None
        from cadenza.sidecar.client.offload.addresses import address_survey  # noqa: PLC0415
        from cadenza.sidecar.client.offload.engine import Offload  # noqa: PLC0415
        from cadenza.sidecar.client.offload.storages import Survey, survey  # noqa: PLC0415

        self._offload = self._offload or Offload()
        look = address_survey.survey if self.addresses_stay else survey
        began, before, self._looked_ahead = monotonic_ns(), self._looked_ahead, None
        try:
            result = look(
                self._sources, refuse_resident=self.refuse_resident, everything=self.everything, before=before
            )
        except Exception as error:  # noqa: BLE001 - torch, its extensions and the user's functions raise anything
            return Survey((), (), f"the state cannot be examined: {type(error).__name__}: {error}")
        self._survey_s = (monotonic_ns() - began) / 1e9
        ranks = self._who.local_world_size if self._who else None
        refusal = result.refusal or self._offload.memory_refusal(
            result.segments, ranks or 1, self.spill_to, result.in_place
        )
        return replace(result, refusal=refusal, spilled=bool(self._offload.spill_to))

    def _pin_ahead(self) -> None:
        """Begin to pin host memory for the GPU state of a job that takes turns; all that it has there may move."""
        sample = gpu_memory() if self.active and self._sources and not self.spill_to else {}
        if sample:
            from cadenza.sidecar.client.offload.engine import Offload  # noqa: PLC0415

            self._offload = self._offload or Offload()
            in_use = sum(now for now, _ in sample.values())
            # Pinning took 0.29 s a GiB on an H100. At the first stop the job that waits for the GPU would pay for it.
            self._offload.pin_ahead(in_use, (self._who.local_world_size if self._who else None) or 1)

    def _call_on_yield(self) -> None:
        """Call the script's functions for a yield; raise MoveError when one of them fails."""
        try:
            _call_all(self._before_offload)
        except Exception as error:  # the user's own code may raise anything
            raise MoveError(f"on_yield failed: {error}") from error

    def _offload_state(self, survey: Survey | None) -> Moved | None:
        """Move out the surveyed state; raise MoveError with all where it was."""
        if survey is None or self._offload is None:
            return None
        return self._offload.offload_in_place() if survey.in_place else self._offload.offload(survey.segments)

    def _moved_report(self, moved: Moved | None, resident: Iterable[str]) -> Message:
        """Return the fields of ``yielded`` about a move, with the memory that each GPU must have for the way back."""
        report = _move_report(moved, resident)
        if moved is not None:
            report["survey_s"] = self._survey_s
        if moved is not None and moved.by_gpu:
            sizes = {gpu: max(out, self.peaks.get(gpu, 0) - left) for gpu, (out, left) in moved.by_gpu.items()}
            report["needed_bytes"] = _by_index(sizes)
        if self._communicators.freed:
            report["regrown_bytes"] = _by_index(self._communicators.freed)
        return report

    def _greeting(self) -> Message:
        """Return the fields of ``attach`` as things stand."""
        who = self._who.fields() if self._who else {}
        owner = {"requeue_owner": self._requeue_owner} if self._requeue_owner else {}
        again = self._link is not None  # else connect() is waiting for the answer
        here = {"state": STATE_NAMES[self._state], "step": self.step, "again": again}
        return {**who, **owner, **here, "together": True, "spills": bool(self.spill_to)}

    def _adopt(self, reply: Reply) -> None:
        """Continue in the page of an agent that was reached, and remember whether the job has its lease."""
        self.switch_page(reply.words)
        self._set_state(self._state)
        self._cancelled = 0
        self._without_lease = not reply.held and self._state != wire.STATE_YIELDED
        self._told_unready = ""
        self._tell_unready()

    def _savers_changed(self) -> None:
        """Tell the agent, in the page, what the savers can do together, and why they cannot."""
        self.words[wire.PAGE_SAVES] = self._savers.able
        if self._savers and self.active:
            self.files.publish()
        self._tell_unready()

    def _tell_unready(self) -> None:
        """Tell the agent why nothing can be ordered from a job that has savers, for its owner to read."""
        reason = self._savers.refusal[:MAX_TEXT] if self._savers else ""
        if self.active and reason != self._told_unready:
            self._told_unready = reason
            self._send("unready", reason=reason)

    def _set_state(self, state: int) -> None:
        """Set this rank's state here and in the page, where the agent reads it."""
        self._state = state
        self.out = state == wire.STATE_YIELDED
        self.words[wire.PAGE_STATE] = state


def _move_report(moved: Moved | None, resident: Iterable[str]) -> Message:
    """Return the fields of ``yielded`` about a move and the storages that stay."""
    names = [text[:MAX_NAME] for text in itertools.islice(resident, MAX_NAMES)]
    if moved is None:
        return {"copy_s": 0.0, "bytes": 0, "resident": names}
    return {"copy_s": moved.seconds, "bytes": moved.nbytes, "left": moved.left, "resident": names}


def _by_index(sizes: Mapping[int, int]) -> list[int]:
    """Return the sizes of GPUs by their index, 0 for those that have none."""
    return [sizes.get(index, 0) for index in range(max(sizes) + 1)]


def _order_of(message: Message) -> int:
    """Return a message's order number; 0 for the link's own messages, which belong to none."""
    number = message.get("order", 0)
    return number if isinstance(number, int) else 0


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    for function in functions:
        function()
