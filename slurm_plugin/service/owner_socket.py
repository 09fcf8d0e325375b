"""The local socket at which users read the record of their own jobs, because the store's file is not theirs to read.

A client connects, sends one line of JSON, ``{"job": 7, "last": 20}``, and gets one JSON answer: an :class:`Answer`. The
kernel says who it is (``SO_PEERCRED``): root and the service's user read every job, other users their own. ``{"job":
null, "since_s": 0}`` asks for the last round as far as it is about the own jobs.
"""

from __future__ import annotations

import logging
import os
import pwd
import socket
import struct
import threading
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.errors import ServiceError, StoreError
from cadenza.slurm_plugin.service.own_jobs import Latest, own_part
from cadenza.slurm_plugin.service.store.reader import JobRecord, StoreReader

log = logging.getLogger(__name__)

MAX_REQUEST = 256
MAX_ROWS = 2000
MAX_ANSWER = 64 * 2**20
REQUEST_TIMEOUT_S = 0.5
"""Time in which a client must have sent its whole request, and in which it must take each part of its answer."""
CLIENTS_PER_USER = 4
"""Connections of one user at once; root and the service's user have no such limit."""
CLIENT_TIMEOUT_S = 30.0
PAUSE_FACTOR = 4.0
"""Answers are made one after the other, with a rest this many times as long as each took: rounds come first."""
POLL_S = 0.5
_CREDENTIALS = struct.Struct("3i")


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The job that is asked for, and the most rows of each kind; without a job, the last round.

    ``since_s``: the time of the first yields and resumes with the last round, seconds since the epoch.
    """

    job: Annotated[int, Meta(ge=1, lt=2**32)] | None
    last: Annotated[int, Meta(ge=1, le=1000)] = 20
    since_s: Annotated[float, Meta(ge=0, le=1e12)] = 0.0


class Answer(msgspec.Struct, frozen=True):
    """The record of a job or the last round, or the reason why there is none."""

    record: JobRecord | None = None
    error: str = ""
    latest: Latest | None = None


class OwnerSocket:
    """Answers in threads of its own, which read the store as every other reader does."""

    def __init__(self, path: Path, store: Path, clock: SystemClock) -> None:
        self.path = path
        self._store = store
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cadenza-jobs", daemon=True)
        self._clients: Counter[int] = Counter()
        """Connections of each user."""
        self._counting, self._answering = threading.Lock(), threading.Lock()
        self._listener: socket.socket | None = None

    def start(self) -> None:
        """Listen; without the socket users cannot read their jobs' records, which is no reason to end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            listener.bind(str(self.path))
            self.path.chmod(0o666)
            listener.listen(128)
            listener.settimeout(POLL_S)
        except OSError as error:
            log.warning("%s: %s; users cannot read the record of their jobs", self.path, error.strerror or error)
            return
        self._listener = listener
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._ended.set()
        if self._listener is not None:
            with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wake:
                wake.settimeout(0)
                wake.connect(str(self.path))
            self._thread.join()
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def _run(self) -> None:
        while not self._ended.is_set() and self._listener is not None:
            try:
                client, _ = self._listener.accept()
            except OSError:  # also the time-out, after which the end is looked for
                continue
            uid = peer_uid(client)
            if uid not in (0, os.geteuid()) and self._clients[uid] >= CLIENTS_PER_USER:
                client.close()
                continue
            with self._counting:
                self._clients[uid] += 1
            threading.Thread(target=self._serve, args=(client, uid), name="cadenza-jobs-client", daemon=True).start()

    def _serve(self, client: socket.socket, uid: int) -> None:
        """Answer one client; a client that is slow delays only itself, and one user has a bounded number of them."""
        try:
            with closing(client), suppress(OSError):
                line = _line(client, self._clock)
                with self._answering:
                    began_s = self._clock.monotonic()
                    answer = msgspec.json.encode(self._answer(line, uid))
                    self._ended.wait(PAUSE_FACTOR * (self._clock.monotonic() - began_s))
                client.sendall(answer)
        finally:
            with self._counting:
                self._clients[uid] -= 1

    def _answer(self, line: bytes, uid: int) -> Answer:
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return Answer(error="no request of this version")
        try:
            with StoreReader(self._store) as reader:
                return _latest(reader, request, uid) if request.job is None else _record(reader, request, uid)
        except StoreError as error:
            log.warning("%s", error)
            return Answer(error="the record cannot be read")
        except Exception:
            log.exception("job %s cannot be shown", request.job)
            return Answer(error="the record cannot be shown")


def _record(reader: StoreReader, request: Request, uid: int) -> Answer:
    """Return the record of a job that the user may read."""
    job = request.job or 0
    last = reader.round()
    record, owner = reader.job_record(job, request.last, last), reader.owner(job, last)
    if owner is None or not may_read(uid, owner):
        return Answer(error=f"job {job}: nothing on record of a job of yours")
    return Answer(record)


def _latest(reader: StoreReader, request: Request, uid: int) -> Answer:
    """Return the last round as far as it is about the user's own jobs."""
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        return Answer(error=f"this machine does not know uid {uid}")
    rows = (reader.actions(limit=MAX_ROWS), reader.switches(since_s=request.since_s), reader.effects(limit=MAX_ROWS))
    return Answer(latest=own_part(reader.round(), user, *rows))


def peer_uid(client: socket.socket) -> int:
    """Return the user of the process at the other end, as the kernel says."""
    _, uid, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def may_read(uid: int, owner: str) -> bool:
    """Return whether a user may read the record of a job of ``owner``."""
    if uid in (0, os.geteuid()):
        return True
    try:
        return pwd.getpwuid(uid).pw_name == owner
    except KeyError:
        return False


def ask(path: Path, job: int, last: int) -> JobRecord:
    """Return the record of a job from a running service.

    Raise ServiceError with the service's reason, and ``OSError`` if there is no service to ask.
    """
    record = _answer_of(path, Request(job, min(last, 1000))).record
    if record is None:
        raise ServiceError(f"{path}: cadenzad's answer is about no job; is it of another version?")
    return record


def ask_latest(path: Path, since_s: float) -> Latest:
    """Return the last round as far as it is about the own jobs; raise as :func:`ask`."""
    latest = _answer_of(path, Request(None, since_s=since_s)).latest
    if latest is None:
        raise ServiceError(f"{path}: cadenzad's answer is about no round; is it of another version?")
    return latest


def _answer_of(path: Path, request: Request) -> Answer:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(CLIENT_TIMEOUT_S)
        link.connect(str(path))
        link.sendall(msgspec.json.encode(request) + b"\n")
        pieces, size = [], 0
        while (piece := link.recv(2**16)) and size <= MAX_ANSWER:
            pieces.append(piece)
            size += len(piece)
    try:
        answer = msgspec.json.decode(b"".join(pieces), type=Answer)
    except msgspec.MsgspecError:
        raise ServiceError(f"{path}: cadenzad did not answer in full; try again") from None
    if answer.error:
        raise ServiceError(answer.error)
    return answer


def _line(client: socket.socket, clock: SystemClock) -> bytes:
    """Return a request; raise OSError for one that does not come in time."""
    data, end_s = b"", clock.monotonic() + REQUEST_TIMEOUT_S
    while not data.endswith(b"\n") and len(data) <= MAX_REQUEST:
        client.settimeout(max(end_s - clock.monotonic(), 0.001))
        piece = client.recv(MAX_REQUEST)
        if not piece:
            break
        data += piece
    client.settimeout(REQUEST_TIMEOUT_S)
    return data
