"""One rank's side of the yield protocol: attach, stop at a boundary, sit out without the lease, go on."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.sidecar import wire
from cadenza.sidecar.client import identity
from cadenza.sidecar.client.errors import AgentRefusedError, ClientError, MoveError, UsageError
from cadenza.sidecar.client.link import Link, Message, Reply
from cadenza.sidecar.client.meter import STOP, Meter, private_page

if TYPE_CHECKING:
    from cadenza.sidecar.client.offload import Moved, Offload
    from cadenza.sidecar.client.storages import Survey

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
        self.refuse_resident = False
        self._sources: list[tuple[str, object]] = []
        self._letting_go: list[Callable[[], object]] = []
        self._taking_again: list[Callable[[], object]] = []
        self._link: Link | None = None
        self._offload: Offload | None = None
        self._state = wire.STATE_RUNNING
        self._who: identity.Identity | None = None
        self._cancelled = 0
        self._unheld = False

    @property
    def active(self) -> bool:
        """Whether this process takes turns; False outside Slurm, without an agent and after detach()."""
        return self._link is not None

    def register(self, name: str, thing: object) -> None:
        """Add state that moves when the job yields.

        That is a tensor, module, optimizer, scaler, container of these, any object with them as attributes,
        or a function that returns one of these whenever it is asked.
        """
        if not any(thing is known for _, known in self._sources):
            self._sources.append((name, thing))

    def call(self, *, on_yield: Callable[[], object], on_resume: Callable[[], object]) -> None:
        """Have functions called around each yield, for what else the process keeps on the GPU.

        ``on_yield`` runs before the state leaves; when it raises, the job does not yield. ``on_resume`` runs once
        the state is back.
        """
        self._letting_go.append(on_yield)
        self._taking_again.append(on_resume)

    def connect(self, path: str, who: identity.Identity) -> None:
        """Present this rank to the agent; without the lease, move the state out and wait here for it.

        Raises AgentRefusedError when the agent does not take this process.
        """
        self._who = who
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
        return {**who, "state": STATE_NAMES[self._state], "step": self.step}

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
        """Stand at the boundary: check what would move, tell the agent, and do what it says."""
        since = link.losses
        self._mark(wire.STATE_ARRIVED)
        try:
            plan = self._survey()
            refused = plan.refused[:MAX_TEXT] if plan else ""
            nbytes = plan.nbytes if plan else 0
            link.send("arrived", since=since, order=order, step=self.step, bytes=nbytes, refused=refused)
            if self._committed(link, order, since) and self._move_out(link, order, plan, since):
                self._await_lease(link)
        finally:
            if self._state == wire.STATE_ARRIVED:
                self._mark(wire.STATE_RUNNING)

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
        link.send("yielded", since=since, order=order, **_report(moved, map(str, resident)))
        return True

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
        link.send("resumed", since=since, order=order, copy_s=moved.seconds if moved else 0.0)

    def _survey(self) -> Survey | None:
        """Check the storages of all registered state; None when this process has no torch state at all."""
        if not self._sources or "torch" not in sys.modules:
            return None
        from cadenza.sidecar.client.storages import survey  # noqa: PLC0415

        return survey(self._sources, refuse_resident=self.refuse_resident)

    def _out(self, plan: Survey | None) -> Moved | None:
        """Let go of everything and move out what was surveyed; raise MoveError with all where it was."""
        try:
            _call_all(self._letting_go)
        except Exception as error:  # the user's own code may raise anything
            raise MoveError(f"on_yield failed: {error}") from error
        if plan is None:
            return None
        from cadenza.sidecar.client.offload import Offload  # noqa: PLC0415

        self._offload = self._offload or Offload()
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


class _Process:
    """What this process has of Cadenza: one session, and what was said once."""

    def __init__(self) -> None:
        self.session: Session | None = None
        self.told = False
        self.fork_watched = False


_process = _Process()


def current() -> Session | None:
    """Return this process's session, if attach() was called."""
    return _process.session


def prepare() -> Session:
    """Return this process's session, made if there is none, and not connected by this."""
    _process.session = _process.session or Session()
    return _process.session


def attach(
    sources: Iterable[tuple[str, object]], *, socket: str | None = None, refuse_resident: bool = False
) -> Session:
    """Return this process's session with the sources registered, connected when there is an agent.

    Raises nothing when there is none, or when it does not take this process: the job then runs as without it.
    """
    session = prepare()
    session.refuse_resident |= refuse_resident
    for name, thing in sources:
        session.register(name, thing)
    if not session.active:
        _connect(session, socket or os.environ.get(wire.SOCKET_ENV) or wire.DEFAULT_SOCKET)
    return session


def detach() -> None:
    """Leave; a later attach() starts a new session. Without one, nothing happens."""
    session = _process.session
    if session is not None:
        session.detach()
        _process.session = None


def _connect(session: Session, path: str) -> None:
    """Connect a session, or say once why this process is left alone."""
    who = identity.here()
    if who is None:
        _say_once("not in a Slurm job: attach() does nothing")
    elif not os.access(Path(path).parent, os.X_OK):
        _say_once(f"no Cadenza agent on this host ({path}): attach() does nothing")
    else:
        _watch_forks()
        try:
            session.connect(path, who)
        except AgentRefusedError as error:
            _say_once(f"the Cadenza agent does not take this process, which runs as without it: {error}")


def _say_once(text: str) -> None:
    """Log one line a process."""
    if not _process.told:
        _process.told = True
        _log.warning(text)


def _call_all(functions: Iterable[Callable[[], object]]) -> None:
    """Call each function, in order."""
    for function in functions:
        function()


def _watch_forks() -> None:
    """Make sure that a forked child, such as a loader's worker, has no part in its parent's session."""
    if not _process.fork_watched:
        _process.fork_watched = True
        os.register_at_fork(after_in_child=_forget_parent)


def _forget_parent() -> None:
    """In a forked child: leave the parent's session alone. Its inherited copy stays, inert."""
    if _process.session is not None:
        _process.session.abandon()
