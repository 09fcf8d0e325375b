"""Each job's samples as lines of JSON in a file of its user, on request; the agent itself opens no user's path."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent_settings import AgentSettings
from cadenza.sidecar.orders import JobTelemetry

log = logging.getLogger(__name__)

VERSION = 1
RECORDS_ENV = "CADENZA_RECORDS"
"""A directory; a job that sets it has its samples written there."""
WRITER = "cadenza.sidecar.agent.telemetry.record_writer"
MAX_BYTES = 64 << 20
"""Size of a job's record file at which it is rotated; one older file is kept."""
MAX_LINE = select.PIPE_BUF
"""A line of at most this much goes into a pipe whole or not at all (pipe(7))."""
READ_S = 0.1
"""Time that the agent waits for a job's environments, once for each new process; what comes later counts later."""
CLOSE_S = 1.0
"""Time allowed to the last lines when the agent ends."""


class Row(msgspec.Struct, frozen=True):
    """One line: a job on a host at one time (epoch seconds), at the step of its furthest rank."""

    v: int
    at_s: float
    job: int
    restart: int
    host: str
    step: int
    telemetry: JobTelemetry


@dataclass(frozen=True, slots=True)
class Owner:
    """A process's user, groups, and the directory that it wants its records in ("": none)."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    directory: str


@dataclass
class _Job:
    """One job's recorder, once there is one."""

    read_pids: set[int] = field(default_factory=set)
    """Pids whose environment was read."""
    found: queue.SimpleQueue[dict[int, Owner | None]] = field(default_factory=queue.SimpleQueue)
    """Owners by pid, as a thread has read them."""
    reading: bool = False
    recorder: subprocess.Popen[bytes] | None = None
    ended: bool = False
    """No more lines are written: refused, or the recorder has ended."""


class Records:
    """The recorders of all jobs that want one. A slow recorder loses lines and delays no job."""

    def __init__(self, settings: AgentSettings) -> None:
        self._kept = settings.agent.records
        self._directory = Path(settings.expert.state_dir) / "records"
        self._host = settings.host_name
        self._jobs: dict[JobKey, _Job] = {}
        self._leaving: list[subprocess.Popen[bytes]] = []

    def write(self, lease: Lease, at_s: float, step: int, telemetry: JobTelemetry) -> None:
        """Append one line to the job's file, if it has one."""
        if self._kept == "off":
            return
        job = self._jobs.setdefault(lease.key, _Job())
        if job.recorder is None and not job.ended:
            self._begin(lease, job)
        if job.recorder is not None:
            row = Row(VERSION, round(at_s, 3), lease.job, lease.restart, self._host, step, telemetry)
            self._pass(lease.key, job, job.recorder, msgspec.json.encode(row) + b"\n")

    def keep_only(self, keys: set[JobKey]) -> None:
        """Let the recorders of all other jobs finish."""
        for key in self._jobs.keys() - keys:
            self._leave(self._jobs.pop(key))
        self._leaving = [one for one in self._leaving if one.poll() is None]

    def close(self) -> None:
        """Let all recorders finish, and wait a little for them."""
        self.keep_only(set())
        for recorder in self._leaving:
            with contextlib.suppress(subprocess.TimeoutExpired):
                recorder.wait(CLOSE_S)

    def _leave(self, job: _Job) -> None:
        """End a recorder's input; it then ends by itself."""
        recorder, job.recorder, job.ended = job.recorder, None, True
        if recorder is not None and recorder.stdin is not None:
            recorder.stdin.close()
            self._leaving.append(recorder)

    def _pass(self, key: JobKey, job: _Job, recorder: subprocess.Popen[bytes], line: bytes) -> None:
        """Give a line to a recorder; if its pipe is full the line is lost."""
        if recorder.stdin is None or len(line) > MAX_LINE:
            return
        try:
            os.write(recorder.stdin.fileno(), line)
        except BlockingIOError:
            log.debug("a record was lost JOBID=%s: its recorder is slow", key)
        except BrokenPipeError:
            log.warning("no more records JOBID=%s: its recorder has ended", key)
            self._leave(job)

    def _begin(self, lease: Lease, job: _Job) -> None:
        """Start the job's recorder if one of its processes, or the settings, want one.

        Environments are read in a thread: a process's memory may be a file of its own that does not answer (FUSE).
        """
        pids = [process.pid for process in lease.processes if process.pid not in job.read_pids]
        if pids and not job.reading:
            job.reading = True
            reader = threading.Thread(target=_read_owners, args=(pids, job.found), name="cadenza-records", daemon=True)
            reader.start()
            reader.join(READ_S)
        if job.found.empty():
            return
        job.reading = False
        for pid, owner in job.found.get().items():
            if owner is None or owner.uid != lease.uid:
                continue  # not yet the user's process: the plugin's becomes it
            job.read_pids.add(pid)
            if directory := owner.directory or self._default(owner):
                self._start(lease, job, owner, directory)
                return

    def _default(self, owner: Owner) -> str:
        """Return the user's directory under ``records/``; "" unless every job is recorded."""
        if self._kept != "jsonl":
            return ""
        try:
            return str(user_directory(self._directory, owner))
        except OSError as error:
            log.warning("no records in %s: %s", self._directory, error)
            return ""

    def _start(self, lease: Lease, job: _Job, owner: Owner, directory: str) -> None:
        """Start the process that writes; it takes the rights of the job's user by itself.

        It begins with the agent's own rights: users need not be able to run the agent's interpreter.
        """
        name = f"{lease.key}.{self._host}.jsonl"
        rights = [str(owner.uid), str(owner.gid), ",".join(map(str, owner.groups))]
        limit = str(MAX_BYTES)
        command = [sys.executable, "-I", "-m", WRITER, *rights, directory, name, limit]
        try:
            job.recorder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env={}, cwd="/", start_new_session=True
            )
        except OSError as error:
            job.ended = True
            log.warning("no records JOBID=%s: %s", lease.key, error)
            return
        if job.recorder.stdin is not None:
            # A recorder on a file system that hangs reads no more, and its full pipe must not stop the agent.
            os.set_blocking(job.recorder.stdin.fileno(), False)
        log.info("recording JOBID=%s uid=%d to %s/%s", lease.key, owner.uid, directory, name)


def _read_owners(pids: Sequence[int], found: queue.SimpleQueue[dict[int, Owner | None]]) -> None:
    found.put({pid: owner_of(pid) for pid in pids})


def owner_of(pid: int) -> Owner | None:
    """Return a process's owner and its directory for records; None if it is gone or changing users.

    The environment is the one that the process began with (proc_pid_environ(5)).
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ids = {
        name: [int(part) for part in rest.split()]
        for name, _, rest in (line.partition(":") for line in status.splitlines())
        if name in {"Uid", "Gid", "Groups"}
    }
    if len(set(ids["Uid"])) != 1 or len(set(ids["Gid"])) != 1:
        return None
    prefix = f"{RECORDS_ENV}=".encode()
    wanted = next((item[len(prefix) :] for item in environment if item.startswith(prefix)), b"")
    directory = os.fsdecode(wanted) if wanted.startswith(b"/") else ""
    return Owner(ids["Uid"][0], ids["Gid"][0], tuple(ids["Groups"]), directory)


def user_directory(base: Path, owner: Owner) -> Path:
    """Return the user's own directory in ``base``, made and handed over if it is missing.

    Raises OSError when that fails, or if others than the agent could replace it.
    """
    base.mkdir(mode=0o755, parents=True, exist_ok=True)
    directory = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"it must belong to uid {os.geteuid()} and be writable for it alone")
        name = str(owner.uid)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=directory)
            os.chown(name, owner.uid, owner.gid, dir_fd=directory, follow_symlinks=False)
    finally:
        os.close(directory)
    return base / name
