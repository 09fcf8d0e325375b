"""The local socket at which users read the record of their jobs, because the store's file is not theirs to read.

A client connects, sends one line of JSON, ``{"job": 7, "last": 20}``, and gets one JSON answer: an :class:`Answer`.
``{"job": null, "since_s": 0}`` asks for the last round, and with ``until_s`` for the effect of sharing in that time.
The kernel says who it is; the agent of another host passes on the same line with the user that its kernel names, and
at the :mod:`question_port` it comes with a credential. :mod:`job_access` says what each may see.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from cadenza.policies.core.errors import InputError
from cadenza.sidecar import local_socket
from cadenza.sidecar.bounds import Name
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.local_socket import LocalSocket
from cadenza.sidecar.orders import MAX_TOLD, VERSION, Ask, Told
from cadenza.slurm_plugin.errors import ServiceError, StoreError
from cadenza.slurm_plugin.service.accounting.sharing_report import SharingReport
from cadenza.slurm_plugin.service.job_access import JobAccess, Viewer
from cadenza.slurm_plugin.service.own_jobs import Latest, Veil, own_part, own_snapshot, recorded_report
from cadenza.slurm_plugin.service.store.reader import JobRecord, StoreReader

log = logging.getLogger(__name__)

DOWN = (
    "cadenzad does not answer at {}: jobs run, and Slurm starts them, as usual; "
    "look on the machine of slurmctld, or ask the admin"
)
MAX_ROWS = 2000
PAUSE_FACTOR = 4.0
"""Answers are made one after the other, with a rest this many times as long as each took: rounds come first."""
OPEN_PER_RELAY, OPEN_PER_HOST = 64, 4
"""Questions of a registered relay, and of any other host, that wait for their answers at once."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job that is asked for, and the most rows of each kind; without a job, the last round or a report.

    ``since_s``: the time of the first yields and resumes with the last round, seconds since the epoch. ``until_s``:
    the end of a report that begins then. ``user``: the only user of the report.
    """

    job: Annotated[int, Meta(ge=1, lt=2**32)] | None
    last: Annotated[int, Meta(ge=1, le=1000)] = 20
    since_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0
    until_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    user: Name | None = None


class Answer(msgspec.Struct, frozen=True):
    """The record of a job, the last round or a report, or the reason why there is none."""

    record: JobRecord | None = None
    error: str = ""
    latest: Latest | None = None
    report: SharingReport | None = None


class OwnerSocket(LocalSocket):
    """Answers in threads of its own, which read the store as every other reader does."""

    def __init__(self, path: Path, store: Path, clock: SystemClock) -> None:
        super().__init__(path, clock)
        self._store = store
        self._access = JobAccess(store, clock)
        self._answering = threading.Lock()
        self._relayed = ThreadPoolExecutor(1, "cadenza-relayed")
        self._open: Counter[str] = Counter()
        """Questions of each host that wait for their answers."""

    def start(self) -> None:
        """Listen; without the socket users cannot read their jobs' records, which is no reason to end."""
        try:
            super().start()
        except OSError as error:
            log.warning("%s: %s; users cannot read the record of their jobs", self.path, error.strerror or error)

    def close(self) -> None:
        """Stop listening."""
        super().close()
        self._relayed.shutdown(cancel_futures=True)

    def answer(self, line: bytes, uid: int) -> bytes:
        """Answer a user of this machine."""
        return self._made(line, self._access.of_uid(uid), f"this machine does not know uid {uid}")

    def relay(self, ask: Ask, here: Collection[str] | None, tell: Callable[[Told], object]) -> None:
        """Answer, by ``tell``, a question that a host's agent passes on; ``here``: see ``JobAccess.relayed``."""

        def work() -> None:
            try:
                answer = self._of_relay(ask, here)
            finally:
                with self._counting:
                    self._open[ask.host] -= 1
            tell(Told(VERSION, ask.id, answer))

        with self._counting:
            busy = self._open[ask.host] >= (OPEN_PER_RELAY if here is None else OPEN_PER_HOST)
            self._open[ask.host] += not busy
        if busy:
            tell(Told(VERSION, ask.id, zlib.compress(_error("too many questions come from this host: try again"))))
        else:
            self._relayed.submit(work)

    def _of_relay(self, ask: Ask, here: Collection[str] | None) -> bytes:
        viewer = self._access.relayed(ask.uid, here)
        if viewer is None:
            log.info("agent HOST=%s: refused to answer uid %d there", ask.host, ask.uid)
            text = f"uid {ask.uid} has no job on {ask.host} on record, and [service] relays does not name {ask.host}"
            plain = _error(text if here is not None else f"{ask.host} does not speak for uid {ask.uid}")
        else:
            plain = self._made(ask.question, viewer, "")
        return _packed(plain)

    def of_credential(self, uid: int, line: bytes) -> bytes:
        """Answer a user that munge or Slurm names, as for a registered relay."""
        viewer = self._access.relayed(uid, None)
        if viewer is None:
            return _packed(_error(f"uid {uid} is asked for on the machine of slurmctld only"))
        return _packed(self._made(line, viewer, ""))

    def _made(self, line: bytes, viewer: Viewer, unknown: str) -> bytes:
        with self._answering:
            began_s = self._clock.monotonic()
            answer = msgspec.json.encode(self._answer(line, viewer, unknown))
            self._ended.wait(PAUSE_FACTOR * (self._clock.monotonic() - began_s))
        return answer

    def _answer(self, line: bytes, viewer: Viewer, unknown: str) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return Answer(error="no request of this version")
        try:
            with StoreReader(self._store) as reader:
                if request.job is not None:
                    return _record(reader, request, viewer)
                if not viewer.user:
                    return Answer(error=unknown)
                return _latest(reader, request, viewer) if request.until_s is None else _report(reader, request, viewer)
        except StoreError as error:
            log.warning("%s", error)
            return Answer(error="the record cannot be read")
        except Exception:
            log.exception("job %s cannot be shown", request.job)
            return Answer(error="the record cannot be shown")


def _record(reader: StoreReader, request: Request, viewer: Viewer) -> Answer:
    """Return the record of a job that the user may read."""
    job = request.job or 0
    last = reader.round()
    record, owner = reader.job_record(job, request.last, last), reader.owner(job, last)
    if owner is None or not viewer.may_read(*owner):
        return Answer(error=f"job {job}: nothing on record of a job of yours")
    veil = Veil.over(last.snapshot, own_snapshot(last.snapshot, viewer)) if last else Veil()
    return Answer(veil.record(record))


def _latest(reader: StoreReader, request: Request, viewer: Viewer) -> Answer:
    """Return the last round as far as it is about the jobs that the user may see."""
    rows = (reader.actions(limit=MAX_ROWS), reader.switches(since_s=request.since_s), reader.effects(limit=MAX_ROWS))
    return Answer(latest=own_part(reader.round(), viewer, *rows))


def _report(reader: StoreReader, request: Request, viewer: Viewer) -> Answer:
    """Return the effect of sharing on the user's own jobs, or on those of the user that an operator names."""
    user = request.user if viewer.everything else viewer.user
    if request.user not in (None, user):
        return Answer(error=f"--user {request.user}: you may see your own jobs only")
    try:
        return Answer(report=recorded_report(reader, request.since_s, request.until_s or 0.0, user))
    except InputError as error:  # its words may name other users
        return Answer(error=str(error) if viewer.everything else "nothing on record of a job of yours in that time")


def _packed(answer: bytes) -> bytes:
    packed = zlib.compress(answer, 1)
    if len(packed) <= MAX_TOLD:
        return packed
    return zlib.compress(_error("the answer is too large to be sent: ask on the machine of slurmctld"))


def _error(text: str) -> bytes:
    return msgspec.json.encode(Answer(error=text))


class Remote(Protocol):
    """A service that is asked at its port: ``question_port.RemoteService``."""

    def ask(self, line: bytes) -> bytes:
        """Return the answer to a request; raise OSError if none comes."""


def ask(path: Path | Remote, job: int, last: int) -> JobRecord:
    """Return the record of a job from a running service, at its socket or port, or by way of an agent's.

    Raise ServiceError with the service's reason, and StoreError if there is no service to ask.
    """
    record = _answer_of(path, Request(job, min(last, 1000))).record
    if record is None:
        raise ServiceError(f"{path}: cadenzad's answer is about no job; is it of another version?")
    return record


def ask_latest(path: Path | Remote, since_s: float) -> Latest:
    """Return the last round as far as it is about the own jobs; raise as :func:`ask`."""
    latest = _answer_of(path, Request(None, since_s=since_s)).latest
    if latest is None:
        raise ServiceError(f"{path}: cadenzad's answer is about no round; is it of another version?")
    return latest


def ask_report(path: Path | Remote, since_s: float, until_s: float, user: str | None) -> SharingReport:
    """Return the effect of sharing on the own jobs; raise as :func:`ask`."""
    report = _answer_of(path, Request(None, since_s=since_s, until_s=until_s, user=user)).report
    if report is None:
        raise ServiceError(f"{path}: cadenzad's answer is no report; is it of another version?")
    return report


def _answer_of(path: Path | Remote, request: Request) -> Answer:
    line = msgspec.json.encode(request)
    try:
        told = local_socket.ask(path, line) if isinstance(path, Path) else path.ask(line)
        answer = msgspec.json.decode(told, type=Answer)
    except OSError:
        raise StoreError(DOWN.format(path)) from None
    except (msgspec.MsgspecError, zlib.error):
        raise ServiceError(f"{path}: cadenzad did not answer in full; try again") from None
    if answer.error:
        raise ServiceError(answer.error)
    return answer
