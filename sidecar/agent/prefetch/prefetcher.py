"""Reads the files of a job that will come into the page cache, while the job still runs on another host.

The agent where the job runs lists the files in use. The agent of its next host reads them in a process of the job's own
user, so that no file is read for another user. Reading is limited in bytes and time, and a failure is only reported.
"""

from __future__ import annotations

import json
import logging
import os
import pwd
import queue
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cadenza.policies.core.model import JobKey
from cadenza.sidecar import orders
from cadenza.sidecar.agent.jobs.host_state import Host
from cadenza.sidecar.agent.leases.lease_table import Lease
from cadenza.sidecar.agent.prefetch import file_reader, open_files

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 120.0
"""Longest time that reading for one job may take."""
SYSTEMD = Path("/run/systemd/system")
"""Directory that exists where systemd is the machine's first process (sd_booted(3))."""
MAX_BYTES = 8 << 30
"""Limit on data read ahead for a job that will move here."""
MAX_RESULTS = 64
"""Number of results that are kept for the reports, the newest."""
READERS = 2


@dataclass
class Prefetcher:
    """The agent's part of prefetching: its threads do the work, and the event loop takes the results."""

    host: Host
    results: dict[JobKey, orders.Prefetched] = field(default_factory=dict)
    """Results of the prefetches for jobs that will come."""
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(READERS, "cadenza-prefetch"))
    _done: queue.SimpleQueue[orders.Prefetched | orders.Files] = field(default_factory=queue.SimpleQueue)

    def list_files(self, lease: Lease) -> None:
        """Find the files of a job that runs here, for its next host."""
        self.host.run(lease.key).followed = True
        pids = {process.pid for process in lease.processes} | set(self.host.run(lease.key).ranks)
        self._pool.submit(self._list, lease, tuple(sorted(pids)))

    def read(self, order: orders.PrefetchOrder) -> None:
        """Read files for a job that will come, if this host's settings allow it."""
        self._pool.submit(self._read, order)

    def tick(self) -> None:
        """Take in the results of the threads."""
        while True:
            try:
                result = self._done.get_nowait()
            except queue.Empty:
                return
            if isinstance(result, orders.Files):
                self.host.upward.append(result)
            else:
                key = JobKey(result.job, result.restart)
                self.results.pop(key, None)
                self.results[key] = result
                while len(self.results) > MAX_RESULTS:
                    del self.results[next(iter(self.results))]
                log.info(
                    "prefetched JOBID=%s files=%d bytes=%d s=%.2f %s",
                    key, result.files, result.bytes, result.seconds, result.note,
                )  # fmt: skip

    def close(self) -> None:
        """Cancel the work without waiting; a reader that still runs ends by its own limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _list(self, lease: Lease, pids: tuple[int, ...]) -> None:
        try:
            self._done.put(self.host.files(lease, open_files.files_of(pids)))
        except Exception:
            log.exception("the files of JOBID=%s were not found", lease.key)

    def _read(self, order: orders.PrefetchOrder) -> None:
        began = self.host.clock.monotonic()
        counts: dict[str, int] = {}
        try:
            counts, note = read_as(order.uid, order.paths, MAX_BYTES), ""
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            note = f"its files were not read: {error}"
        self._done.put(
            orders.Prefetched(
                job=order.job,
                restart=order.restart,
                files=counts.get("files", 0),
                bytes=counts.get("bytes", 0),
                seconds=self.host.clock.monotonic() - began,
                note=note,
            )
        )


def read_as(uid: int, paths: tuple[str, ...], max_bytes: int) -> dict[str, int]:
    """Read files as a user; return counts of files, bytes and those left out.

    Raise ValueError for root, KeyError for a user that this host does not know, OSError or SubprocessError when that
    process fails.
    """
    if uid == 0:
        raise ValueError("files are never read as root")
    if not max_bytes:
        return {}
    words = [sys.executable, "-I", str(Path(file_reader.__file__)), str(max_bytes)]
    rights: dict[str, Any] = {}
    if not uid == os.geteuid() != 0:  # without root only the agent's own user is possible
        user = pwd.getpwuid(uid)
        groups = os.getgrouplist(user.pw_name, user.pw_gid)
        if apart := outside(uid, user.pw_gid, groups):
            words = [*apart, *words]
        else:
            rights = {"user": uid, "group": user.pw_gid, "extra_groups": groups}
    done = subprocess.run(
        words,
        input="\n".join(paths).encode("utf-8", errors="surrogateescape"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=READ_TIMEOUT_S, check=True, cwd="/", env={},
        **rights,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def outside(uid: int, gid: int, groups: Sequence[int]) -> list[str]:
    """Return the command that runs another one as a user and in a scope of its own; nothing where there is no systemd.

    The kernel charges the page cache to the group of the process that first reads a file, and keeps no more of it than
    that group's limit, which for the agent's unit is small (cgroup-v2, Memory Ownership; MemoryHigh=).
    """
    run, drop = shutil.which("systemd-run"), shutil.which("setpriv")
    if not SYSTEMD.is_dir() or run is None or drop is None:
        return []
    scope = [run, "--scope", "--quiet", "--collect", "--slice=system.slice", "--"]
    return [*scope, drop, f"--reuid={uid}", f"--regid={gid}", f"--groups={','.join(map(str, groups))}", "--"]
