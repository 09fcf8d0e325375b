"""A stand-in for pyslurm, which cannot be built without Slurm: a few jobs and nodes, and misbehavior on demand.

``PYSLURM_TROUBLE`` names what goes wrong (import, hang, segv, exit, print); with ``PYSLURM_TROUBLE_ONCE`` naming a
file, only as long as that file does not exist. ``PYSLURM_LOG`` collects the calls that change something, the file
next to it with ``.looks`` at its end the jobs that were looked at.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

__version__ = "26.5.0"


class RPCError(Exception):
    def __init__(self, errno: int, msg: str) -> None:
        super().__init__(msg)
        self.errno = errno
        self.msg = msg


def trouble(kind: str) -> bool:
    if os.environ.get("PYSLURM_TROUBLE") != kind:
        return False
    once = os.environ.get("PYSLURM_TROUBLE_ONCE")
    if once and Path(once).exists():
        return False
    if once:
        Path(once).touch()
    return True


def misbehave() -> None:
    if trouble("hang"):
        time.sleep(600)
    if trouble("segv"):
        ctypes.string_at(0)
    if trouble("exit"):
        os._exit(7)
    print("pyslurm prints to stdout")


def log(*what: object) -> None:
    with Path(os.environ["PYSLURM_LOG"]).open("a") as file:
        print(*what, file=file)


if trouble("import"):
    raise ImportError("libslurmfull.so: cannot open shared object file")

BOOT_S = int(time.time())
STATES = {1: "RUNNING", 2: "SUSPENDED", 3: "PENDING", 4: "COMPLETED", 5: "PENDING", 6: "FAILED"}


class JobSubmitDescription:
    def __init__(self, **changes: Any) -> None:
        self.changes = changes


class Job:
    cpus_per_task = 2
    min_cpus_per_node = 2
    ntasks = 2
    num_nodes = 2
    required_nodes = "node1"
    allocated_nodes = "node[1-2]"

    def __init__(self, number: int) -> None:
        self.id = number
        self.state = STATES[number]
        self.requeue_count = 0
        self.priority = 0 if number == 3 else 1
        self.exit_code_signal = 15 if number == 6 else 0
        self.end_time = BOOT_S if number == 6 else None
        self.is_requeueable = self.is_batch_job = number == 6

    @property
    def comment(self) -> str:
        if self.id == 5:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return '{"cadenza":{"v":1}}'

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "gres":
            raise AttributeError(name)
        return None

    @staticmethod
    def load(number: int) -> Job:
        misbehave()
        with Path(os.environ["PYSLURM_LOG"] + ".looks").open("a") as file:
            print(number, file=file)
        if number not in STATES:
            raise RPCError(2017, "Invalid job id specified")
        return Job(number)

    def suspend(self) -> None:
        log("suspend", self.id)

    def unsuspend(self) -> None:
        log("unsuspend", self.id)

    def requeue(self, hold: bool) -> None:
        log("requeue", self.id, hold)

    def modify(self, description: JobSubmitDescription) -> None:
        changes = description.changes
        nodes = changes.get("required_nodes")
        if nodes == ["nowhere"]:
            raise RPCError(2018, "Invalid node name specified")
        # What pyslurm's Cython does with the value: empty means "not set", and the first NUL ends it.
        texts = {name: value for name, value in changes.items() if isinstance(value, str)}
        sent = {name: text and text[0] != "\0" and str.__str__(text).split("\0")[0] for name, text in texts.items()}
        log("modify", self.id, changes | sent)


class Jobs:
    @staticmethod
    def load(preload_passwd_info: bool) -> dict[int, Job]:
        misbehave()
        return {number: Job(number) for number in STATES}


class Node:
    def __init__(self, name: str | None = None, **changes: Any) -> None:
        self.name = name
        self.changes = changes
        self.state = "IDLE+DRAIN" if name in {"ours", "theirs"} else "IDLE"
        self.reason = {"ours": "cadenza: observing", "theirs": "bad fan"}.get(name or "")
        self.reason_user = "root"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "gres":
            raise AttributeError(name)
        return None

    @staticmethod
    def load(name: str) -> Node:
        return Node(name)

    def modify(self, changes: Node) -> None:
        if self.name == "guarded":
            raise RPCError(2010, "Invalid user id")
        log("node", self.name, changes.changes)


class Nodes:
    @staticmethod
    def load() -> dict[str, Node]:
        return {}


class Reservations:
    @staticmethod
    def load() -> dict[str, SimpleNamespace]:
        return {"r1": SimpleNamespace(name="r1", start_time=100, nodes="node1")}


def _ping() -> SimpleNamespace:
    misbehave()
    return SimpleNamespace(hostname="ctl", is_responding=True, latency=0.5)


slurmctld = SimpleNamespace(
    ping_primary=_ping, Config=SimpleNamespace(load=lambda: SimpleNamespace(slurmctld_boot_time=BOOT_S))
)
utils = SimpleNamespace(helpers=SimpleNamespace(nodelist_from_range_str=lambda _: ["node1", "node2"]))
