"""One rank's side of the yield protocol: attach, stop at a boundary, sit out without the lease, go on."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from cadenza.sidecar import wire
from cadenza.sidecar.client.errors import ClientError, MoveError, UsageError
from cadenza.sidecar.client.offload.pin_threads import quiet
from cadenza.sidecar.client.session import checkpoint_request, identity, resources
from cadenza.sidecar.client.session.agent_link import Link, Message, Reply
from cadenza.sidecar.client.session.prefetch_hints import FileList
from cadenza.sidecar.client.session.step_page import STOP, Meter, private_page

if TYPE_CHECKING:
    from cadenza.sidecar.client.offload.engine import Moved, Offload
    from cadenza.sidecar.client.offload.storages import Survey

VERDICT_S = 300.0
"""How long a rank that stands at its boundary waits for the agent's word before it goes on."""
MAX_NAMES = 32
MAX_NAME = 300
MAX_TEXT = 2000
"""Bounds of what one message says about storages that stay."""
STATE_NAMES = {wire.STATE_RUNNING: "running", wire.STATE_ARRIVED: "running", wire.STATE_YIELDED: "yielded"}
"""What a reconnecting rank says: one that had arrived, uncommitted, goes on and is running."""

_log = logging.getLogger("cadenza.client")


class Session(Meter):
    """One attached rank: ``step`` counts its boundaries, ``active`` says whether an agent may stop it."""

    def __init__(self) -> None:
        super().__init__(private_page())
        self.automatic = False
        """The optimizer hook attached it and calls its boundaries; an explicit attach() ends that."""
        self.explicit = False
        """Somebody called attach(); a script that only keeps checkpoints has a session too."""
        self.refuse_resident = False
        self.spill_to = ""
        """A directory on a disk of this node for state that host memory cannot take; "": none."""
        self._sources: list[tuple[str, object]] = []
        self._letting_go: list[Callable[[], object]] = []
        self._taking_again: list[Callable[[], object]] = []
        self.files = FileList()
        """What this process will read again when it starts on another host; see ``FileList.name``."""
        self._saver: checkpoint_request.Saver | None = None
        self._owed: tuple[Link, int, int] | None = None
        """A checkpoint that was ordered and that its framework saves after the boundary: link, order, losses."""
        self._link: Link | None = None
        self._offload: Offload | None = None
        self._state = wire.STATE_RUNNING
        self._who: identity.Identity | None = None
        self._cancelled = 0
        self._unheld = False
        self._requeue_owner = identity.requeue_owner(os.environ)

    @property
    def active(self) -> bool:
        """Whether this process takes turns; False outside Slurm, without an agent and after detach()."""
        return self._link is not None

    @property
    def local_ranks(self) -> int:
        """How many ranks of the job share this node's CPUs and caches."""
        return (self._who.local_world_size if self._who else None) or resources.local_ranks()

    @property
    def gpus(self) -> int:
        """How many GPUs the whole job has now, each of its nodes as many as this one; 0 outside a Slurm job."""
        who = self._who or identity.here()
        return len(who.gpus) * who.hosts if who else 0

    def tuning(self) -> resources.Tuning | None:
        """Return the CPUs and the cache budget that the whole job has on this node now; None: nobody has said it."""
        return resources.read(self.words)

    def requeued_by(self, owner: str) -> None:
        """Tell the agent that somebody else requeues this job, such as ``lightning``, so that Cadenza does not."""
        self._requeue_owner = owner
        if self._link:
            self._link.send("requeued_by", owner=owner)

    def look_at_memory(self) -> None:
        """Look at the GPU's memory, and at what the job has, for caches behind a loader that does not look."""
        super().look_at_memory()
        resources.look()
        if self._saver is not None:
            self.files.tell()

    def register(self, name: str, thing: object) -> None:
        """Add state that moves when the job yields.

        That is a tensor, module, optimizer, scaler, container of these, any object with them as attributes,
        or a function that returns one of these whenever it is asked.
        """
        if not any(thing is known for _, known in self._sources):
            self._sources.append((name, thing))

    def call(
        self,
        *,
        on_yield: Callable[[], object] | None = None,
        on_resume: Callable[[], object] | None = None,
        on_checkpoint: checkpoint_request.Saver | None = None,
    ) -> None:
        """Have functions called around each yield, for what else the process keeps on the GPU, and to save.

        ``on_yield`` runs before the state leaves; when it raises, the job does not yield. ``on_resume`` runs once
        the state is back. ``on_checkpoint`` runs on every rank at the same boundary when Cadenza wants to requeue
        the job: it returns when a checkpoint is complete on the disk (its path, or ``ordered.Saved``), raises when
        that cannot be, or returns ``ordered.LATER`` and has ``checkpointed()`` called. The last one given counts.
        """
        self._letting_go += [on_yield] if on_yield else []
        self._taking_again += [on_resume] if on_resume else []
        if on_checkpoint is not None:
            self.saves_with(on_checkpoint)

    def saves_with(self, saver: checkpoint_request.Saver | None) -> None:
        """Say how this rank saves a checkpoint on order; None: it cannot, and is not asked to."""
        self._saver = saver
        self.words[wire.PAGE_SAVES] = int(saver is not None)
        if saver is not None and self.active:
            self.files.tell()

    def checkpointed(self, path: str = "", step: int | None = None, error: str = "") -> None:
        """Say that the checkpoint promised by ``ordered.LATER`` is complete, and wait to be requeued.

        Returns, as if nothing had been, when the job is not requeued after all; at once when none was ordered, or
        with the ``error`` for which it could not be saved.
        """
        owed, self._owed = self._owed, None
        if owed is not None:
            saved = checkpoint_request.Saved(self.step if step is None else step, path=path)
            self._stand(*owed, {**saved.fields(0.0), "error": error[:MAX_TEXT]})

    def connect(self, path: str, who: identity.Identity) -> None:
        """Present this rank to the agent; without the lease, move the state out and wait here for it.

        Raises AgentRefusedError when the agent does not take this process.
        """
        self._who = who
        resources.listen(self)
        link = Link(path, self._greeting, self.words)
        reply = link.open()
        self._link = link
        if reply:
            self._adopt(reply)
            if self._unheld:
                self._sit_out(order=0)
            self.restart_clock()

    def detach(self) -> None:
        """Leave: this process is not stopped any more. Raises UsageError while the state is away."""
        if self._state == wire.STATE_YIELDED:
            raise UsageError("detach() while this job's state is in host memory: wait for its lease first")
        link, self._link = self._link, None
        self._sources.clear()
        self._letting_go.clear()
        self._taking_again.clear()
        self._saver = None
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

    def reached(self) -> None:
        """Act on the page's stop step (the slow path of a boundary)."""
        link = self._link
        if link is None:
            self.words[STOP] = 0
            return
        if not link.alive or self._state == wire.STATE_YIELDED:
            self.words[STOP] = 0
        if reply := link.take_fresh():
            self._adopt(reply)
        order = self.words[wire.PAGE_ORDER]
        if self._unheld or self._state == wire.STATE_YIELDED:
            self._sit_out(order)
        elif 0 < self.words[STOP] <= self.step and link.alive and order != self._cancelled:
            self._arrive(link, order)

    def _greeting(self) -> Message:
        """Return the fields of ``attach`` as things stand."""
        who = self._who.fields() if self._who else {}
        owner = {"requeue_owner": self._requeue_owner} if self._requeue_owner else {}
        again = self._link is not None  # else connect() is waiting for the answer
        return {**who, **owner, "state": STATE_NAMES[self._state], "step": self.step, "again": again}

    def _adopt(self, reply: Reply) -> None:
        """Go on in the page of an agent that was reached, and remember whether the lease is ours."""
        self.move_to(reply.words)
        self._mark(self._state)
        self._cancelled = 0
        self._unheld = not reply.held and self._state != wire.STATE_YIELDED

    def _mark(self, state: int) -> None:
        """Set this rank's state, for the agent too."""
        self._state = state
        self.words[wire.PAGE_STATE] = state

    def _arrive(self, link: Link, order: int) -> None:
        """Stand at the boundary, tell the agent, and do what it says."""
        saves = self.words[wire.PAGE_PURPOSE] == wire.PURPOSE_CHECKPOINT
        self._mark(wire.STATE_ARRIVED)
        try:
            if saves:
                self._arrive_to_save(link, order, link.losses)
            else:
                self._arrive_to_yield(link, order, link.losses)
        finally:
            if self._state == wire.STATE_ARRIVED:
                self._mark(wire.STATE_RUNNING)

    @quiet()
    def _arrive_to_yield(self, link: Link, order: int, since: int) -> None:
        """Check what would move, and move it when all are here."""
        plan = self._survey()
        refused = plan.refused[:MAX_TEXT] if plan else ""
        nbytes = plan.host_bytes if plan else 0
        self.order_arrived()
        link.send("arrived", since=since, order=order, step=self.step, bytes=nbytes, refused=refused)
        if self._committed(link, order, since) and self._move_out(link, order, plan, since):
            self._await_lease(link)

    def _arrive_to_save(self, link: Link, order: int, since: int) -> None:
        """Save a checkpoint when all are here, and stand until the job is requeued or sent on."""
        saver = self._saver
        refused = "" if saver else checkpoint_request.CANNOT
        self.order_arrived()
        link.send("arrived", since=since, order=order, step=self.step, bytes=0, refused=refused)
        if saver is None or not self._committed(link, order, since):
            return
        self._cancelled = order  # no boundary arrives for it again while the page still names it
        answer = checkpoint_request.save(saver, self.step)
        if answer is None:
            self._owed = (link, order, since)
        else:
            self._stand(link, order, since, answer)

    def _stand(self, link: Link, order: int, since: int, answer: Message) -> None:
        """Tell how a checkpoint went; after a good one stand still until ``cancel``, a loss or the time is up."""
        self.order_done()
        link.send("checkpointed", since=since, order=order, **answer)
        if answer["error"]:
            return
        with checkpoint_request.ends_at_once():
            while link.losses == since:
                message = link.receive(VERDICT_S)
                if message is None or _order(message) > order:
                    return
                if _order(message) == order and self._goes_on(message):
                    return

    def _committed(self, link: Link, order: int, since: int) -> bool:
        """Wait for the agent's word on an order; True for commit, False to go on."""
        while link.losses == since:
            message = link.receive(VERDICT_S)
            if message is None:
                text = f"step {self.step}: no word for {VERDICT_S:.0f} s, going on"
                link.send("arrived", since=since, order=order, step=self.step, bytes=0, refused=text)
                self._cancelled = order
                return False
            number, kind = _order(message), message["type"]
            if number > order or (number == order and self._goes_on(message)):
                return False
            if number == order and kind == "commit":
                link.forget()
                return True
        return False

    def _goes_on(self, message: Message) -> bool:
        """Whether a message about this order ends the stay at this boundary."""
        if message["type"] == "cancel":
            self._cancelled = _order(message)
            return True
        return bool(message["type"] == "stop" and message.get("step", 0) > self.step)

    def _move_out(self, link: Link, order: int, plan: Survey | None, since: int) -> bool:
        """Move the state to host memory and say so; False when that failed or the order is void by now."""
        with link.steady:
            if link.losses != since:
                return False
            try:
                moved = self._out(plan)
            except ClientError as error:
                _log.warning("this job could not yield and goes on: %s", error)
                self._cancelled = order
                text = str(error)[:MAX_TEXT]
                link.send("yielded", since=since, order=order, copy_s=0.0, bytes=0, error=text)
                return False
            self._mark(wire.STATE_YIELDED)
        resident = plan.resident if plan else ()
        self.order_done()
        link.send("yielded", since=since, order=order, **_report(moved, map(str, resident)))
        return True

    @quiet()
    def _sit_out(self, order: int) -> None:
        """Be without the lease: move out what can be moved, and wait in any case."""
        link = self._link
        if link is None:
            return
        self._unheld = False
        if self._state != wire.STATE_YIELDED:
            with link.steady:
                since = link.losses
                moved, stays = self._out_if_possible()
                self._mark(wire.STATE_YIELDED)
            link.send("yielded", since=since, order=order, **_report(moved, stays))
        self._await_lease(link)

    def _out_if_possible(self) -> tuple[Moved | None, list[str]]:
        """Move out what may move; return that and what stays, or why everything does."""
        plan = self._survey()
        why = plan.refused if plan else ""
        if not why:
            try:
                return self._out(plan), [str(kept) for kept in plan.resident] if plan else []
            except ClientError as error:
                why = str(error)
        _log.warning("waiting for the lease with this job's state still in place: %s", why)
        return None, [why]

    def _await_lease(self, link: Link) -> None:
        """Wait until the agent says ``resume``, however often it is lost meanwhile, and move back.

        An exception from a signal handler leaves this wait. State that came from host memory is put back
        first; device state stays away, because the device may be another job's, and the next boundary waits
        again.
        """
        try:
            while (message := link.receive()) and message["type"] != "resume":
                if message["type"] == "attached" and (reply := link.take_fresh()):
                    self._adopt(reply)
        except BaseException:
            self.words[STOP] = 1  # leads the next boundary here
            if self._offload and not self._offload.needs_gpu:
                self._offload.back()
            raise
        self._move_back(link, _order(message or {}))

    def _move_back(self, link: Link, order: int) -> None:
        """Bring the state back under the lease, and say so."""
        with link.steady:
            since = link.losses
            moved = self._offload.back() if self._offload and self._offload.away else None
            self._mark(wire.STATE_RUNNING)
        _call_all(self._taking_again)
        resources.look()
        link.send("resumed", since=since, order=order, copy_s=moved.seconds if moved else 0.0)

    def _survey(self) -> Survey | None:
        """Check the storages of all registered state; None when this process has no torch state at all."""
        if not self._sources or "torch" not in sys.modules:
            return None
        from cadenza.sidecar.client.offload.engine import Offload  # noqa: PLC0415
        from cadenza.sidecar.client.offload.storages import survey  # noqa: PLC0415

        self._offload = self._offload or Offload()
        plan = survey(self._sources, refuse_resident=self.refuse_resident)
        ranks = self._who.local_world_size if self._who else None
        refused = plan.refused or self._offload.short(plan.segments, ranks or 1, self.spill_to)
        return replace(plan, refused=refused, spilled=bool(self._offload.spill_to))

    def _out(self, plan: Survey | None) -> Moved | None:
        """Let go of everything and move out what was surveyed; raise MoveError with all where it was."""
        try:
            _call_all(self._letting_go)
        except Exception as error:  # the user's own code may raise anything
            raise MoveError(f"on_yield failed: {error}") from error
        if plan is None or self._offload is None:
            return None
        try:
            return self._offload.out(plan.segments)
        except MoveError:
            _call_all(self._taking_again)
            raise


def _report(moved: Moved | None, resident: Iterable[str]) -> Message:
    """Return what ``yielded`` says of a move and of what stays."""
    stays = [text[:MAX_NAME] for text in itertools.islice(resident, MAX_NAMES)]
    if moved is None:
        return {"copy_s": 0.0, "bytes": 0, "resident": stays}
    return {"copy_s": moved.seconds, "bytes": moved.nbytes, "left": moved.left, "resident": stays}


def _order(message: Message) -> int:
    """Return a message's order number; 0 for the link's own messages, which belong to none."""
    number = message.get("order", 0)
    return number if isinstance(number, int) else 0


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call each function, in order."""
    for function in functions:
        function()
