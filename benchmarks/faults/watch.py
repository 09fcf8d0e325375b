#!/usr/bin/env python3
"""Root's own look at one container of a fault run, a JSON object a line: it believes no job and no daemon.

``node``: which jobs have a lock on which GPU, which are frozen, which have processes. ``ctl``: Slurm's jobs and nodes,
and the service's reason for each job.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

GPUS = Path("/dev/shm/gpus")  # noqa: S108 (of the host)
LOCK_PERIOD_S, HOST_PERIOD_S, SLURM_PERIOD_S = 0.1, 1.0, 2.0
CONFIRM_S = 0.02
SLURM_TIMEOUT_S = 4.0
_JOB = re.compile(r"/job_(\d+)")
_FIELD = re.compile(r"(?:^| )([A-Za-z]+(?:/[A-Za-z]+)?)=(\S*)")
_GRES = re.compile(r"Nodes=(\S+) CPU_IDs=\S* Mem=\d+ GRES=(\S*)")
JOB_FIELDS = ("JobId", "JobState", "Reason", "Restarts", "NodeList", "ReqNodeList", "Priority", "StartTime", "StdOut")
NODE_FIELDS = ("NodeName", "State", "Gres", "AllocTRES")
STORE = "file:/var/lib/cadenzad/cadenza.db?mode=ro"


def say(**values: Any) -> None:
    """Print one observation with its time, seconds since the epoch."""
    print(json.dumps({"t": time.time(), **values}), flush=True)


# --- A host --------------------------------------------------------------------------------------------


def job_of(pid: str) -> int | None:
    """Return the job of a process by the cgroup that Slurm put it into, without cgroups by its environment."""
    try:
        found = _JOB.search(Path("/proc", pid, "cgroup").read_text())
        if found is None:
            found = re.search(rb"(?:^|\0)SLURM_JOB_ID=(\d+)", Path("/proc", pid, "environ").read_bytes())  # type: ignore[assignment]
    except OSError:
        return None
    return int(found[1]) if found else None


def users_of_gpus() -> dict[str, list[int]]:
    """Return the jobs that have a lock on each GPU's file."""
    inodes = {str(path.stat().st_ino): path.name for path in GPUS.iterdir()} if GPUS.is_dir() else {}
    users: dict[str, set[int]] = {}
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] != "FLOCK" or (gpu := inodes.get(words[5].rpartition(":")[2])) is None:
            continue
        job = job_of(words[4])
        users.setdefault(gpu, set()).add(-1 if job is None else job)
    return {gpu: sorted(jobs) for gpu, jobs in sorted(users.items())}


def frozen_jobs() -> list[int]:
    """Return the jobs of which a control group is frozen, by version 1's state or version 2's."""
    jobs = set()
    for base, _, files in os.walk("/sys/fs/cgroup", followlinks=False):
        if "/job_" not in base:
            continue
        for name, mark in (("freezer.state", ("FROZEN", "FREEZING")), ("cgroup.freeze", ("1",))):
            if name in files and _content(Path(base, name)) in mark:
                jobs.add(int(_JOB.search(base)[1]))  # type: ignore[index]
    return sorted(jobs)


def _content(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def processes() -> dict[int, list[int]]:
    """Return each job's training processes."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            command = (path / "cmdline").read_bytes()
        except OSError:
            continue
        if b"digest_job.py" in command and not command.startswith(b"srun") and (job := job_of(path.name)) is not None:
            found.setdefault(job, []).append(int(path.name))
    return found


def watch_host() -> None:
    """Report each change of the GPUs' users, and the rest every second."""
    before, next_s = None, 0.0
    while True:
        users = users_of_gpus()
        if any(len(jobs) > 1 for jobs in users.values()):
            time.sleep(CONFIRM_S)  # one reading of /proc/locks is no single moment
            again = users_of_gpus()
            users = {gpu: [job for job in jobs if job in again.get(gpu, ())] for gpu, jobs in users.items()}
        if users != before:
            say(gpus=users)
            before = users
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + HOST_PERIOD_S
            say(gpus=users, frozen=frozen_jobs(), processes=processes())
        time.sleep(LOCK_PERIOD_S)


# --- Slurm ---------------------------------------------------------------------------------------------


def scontrol(kind: str) -> list[str] | None:
    """Return ``scontrol show`` of jobs or nodes, a line each; None when slurmctld does not answer."""
    words = ["scontrol", "-o", "-d", "show", kind]
    try:
        done = subprocess.run(words, capture_output=True, timeout=SLURM_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout.decode(errors="replace").splitlines()


def fields(line: str, names: Iterable[str]) -> dict[str, str]:
    """Return the first value of each of these fields in a line of scontrol."""
    values: dict[str, str] = {}
    for name, value in _FIELD.findall(line):
        values.setdefault(name, value)
    return {name: values.get(name, "") for name in names}


def job(line: str) -> dict[str, Any]:
    """Return one job with its GPUs by node; its name is that of its log, for Slurm has one for all of them."""
    found = fields(line, JOB_FIELDS)
    return found | {"JobName": Path(found["StdOut"]).stem, "gpus": {node: gres for node, gres in _GRES.findall(line)}}  # noqa: C416


def watch_slurm() -> None:
    """Report Slurm's jobs and nodes; ``up`` is False when it does not answer."""
    while True:
        jobs = scontrol("jobs")
        nodes = None if jobs is None else scontrol("nodes")
        if jobs is None or nodes is None:
            say(up=False)
        else:
            found = [job(line) for line in jobs if "JobId=" in line]
            say(up=True, jobs=found, nodes=[_node(line) for line in nodes], reasons=reasons())
        time.sleep(SLURM_PERIOD_S)


def reasons() -> dict[int, str]:
    """Return the service's last reason for each job; empty while its record cannot be read."""
    try:
        with closing(sqlite3.connect(STORE, uri=True, timeout=1.0)) as store:
            return dict(
                store.execute("SELECT job, reason FROM (SELECT job, reason, max(at_s) FROM reasons GROUP BY job)")
            )
    except sqlite3.Error:
        return {}


def _node(line: str) -> Mapping[str, str]:
    reason = re.search(r" Reason=(.*?)(?: \[|$)", line)
    return fields(line, NODE_FIELDS) | {"Reason": reason[1] if reason else ""}


if __name__ == "__main__":
    {"node": watch_host, "ctl": watch_slurm}[sys.argv[1]]()
