"""The worker process around pyslurm: reads Slurm and changes it, one JSON line for each request of ``verbs``.

``python -m cadenza.slurm_plugin.gateway.worker FD`` serves requests on the socket FD until its other end
closes. It is a process of its own because pyslurm is licensed under GPL-2.0, holds the GIL during RPCs, is
not thread-safe, leaks, and may crash. Nothing else imports pyslurm, and this module imports little but the
standard library.

The first line is a greeting.
"""

from __future__ import annotations

import importlib
import json
import os
import pwd
import socket
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from cadenza.slurm_plugin.gateway.verbs import Verbs

JOB_FIELDS = (
    "id", "requeue_count", "name", "user_name", "account", "partition", "qos", "state", "state_reason",
    "priority", "cpus", "cpus_per_task", "ntasks", "num_nodes", "memory", "memory_per_node", "memory_per_cpu",
    "submit_time", "eligible_time", "start_time", "end_time", "exit_code_signal",
    "suspend_time", "pre_suspension_time", "time_limit", "comment", "constraints", "command",
    "reservation", "is_requeueable", "is_batch_job", "resource_sharing", "heterogeneous_id", "is_cronjob",
    "array_id", "array_task_id", "array_tasks_waiting", "gres_per_node", "requested_tres", "allocated_tres",
    "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket", "sockets_per_node",
)  # fmt: skip
NODE_FIELDS = (
    "name", "hostname", "state", "reason", "reason_user", "partitions", "available_features",
    "effective_cpus", "total_cpus", "real_memory", "allocated_cpus", "allocated_memory", "free_memory",
    "configured_gres", "allocated_gres", "allocated_tres", "slurm_version", "weight", "reason_time",
    "slurmd_start_time",
)  # fmt: skip


class Blank(str):
    """An empty string that pyslurm sends to slurmctld: there, it clears a field.

    pyslurm takes "" for "leave as it is". It looks at ``value[0]`` to decide, and copies up to the first NUL.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> str:
        return "x"


BLANK = Blank("\0")
# --- Reading -------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """Return a property of pyslurm as JSON can carry it; of trackable resources the counts."""
    if not hasattr(value, "gres"):
        return value
    counts = {f"gres/{name}": item.count for name, item in value.gres.items()}
    for name in ("cpu", "mem", "node"):
        item = getattr(value, name, None)
        if item is not None:
            counts[name] = item.count
    return counts


def read_field(record: Any, name: str) -> tuple[Any, bool]:
    """Return a property and whether it could be read.

    Names and comments are bytes of the user's choosing: one that is not UTF-8 must not hide the other jobs.
    """
    try:
        return plain(getattr(record, name)), True
    except (ValueError, LookupError, TypeError, AttributeError):
        return None, False


def read_fields(record: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the named properties of a pyslurm object; ``unreadable`` lists those that could not be read."""
    fields = {name: read_field(record, name) for name in names}
    values = {name: value for name, (value, _) in fields.items()}
    unreadable = [name for name, (_, readable) in fields.items() if not readable]
    return values | {"unreadable": unreadable} if unreadable else values


class Pyslurm:
    """Slurm through the module pyslurm."""

    def __init__(self, slurm: Any) -> None:
        self._slurm = slurm
        self.error: type[Exception] = slurm.RPCError

    def greeting(self) -> dict[str, Any]:
        """Return pyslurm's version, and the worker's pid and user."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        return {"pyslurm": self._slurm.__version__, "pid": os.getpid(), "user": user}

    def ping(self) -> dict[str, Any]:
        """Ping the primary slurmctld; ``latency_ms`` is the RPC's time."""
        answer = self._slurm.slurmctld.ping_primary()
        return {"host": answer.hostname, "responding": answer.is_responding, "latency_ms": answer.latency}

    def jobs(self) -> Iterable[Any]:
        """Return all jobs."""
        # Without the preload pyslurm looks up a user of the system for each job.
        return list(self._slurm.Jobs.load(preload_passwd_info=True).values())

    def nodes(self) -> Iterable[Any]:
        """Return all nodes."""
        return list(self._slurm.Nodes.load().values())

    def reservations(self) -> list[dict[str, Any]]:
        """Return all reservations."""
        return [
            {"name": one.name, "start_time": one.start_time, "nodes": self._hosts(one.nodes)}
            for one in self._slurm.Reservations.load().values()
        ]

    def started_s(self) -> float:
        """Return when slurmctld started."""
        return float(self._slurm.slurmctld.Config.load().slurmctld_boot_time)

    def job_fields(self, job: Any) -> dict[str, Any]:
        """Return a job's properties, its lists of nodes as lists."""
        lists = ("allocated_nodes", "required_nodes", "excluded_nodes")
        return read_fields(job, JOB_FIELDS) | {name: self._hosts(getattr(job, name)) for name in lists}

    def _hosts(self, text: str | None) -> list[str]:
        if not text:
            return []
        if "[" not in text:
            return text.split(",")
        return list(self._slurm.utils.helpers.nodelist_from_range_str(text))

    def node_fields(self, node: Any) -> dict[str, Any]:
        """Return a node's properties."""
        return read_fields(node, NODE_FIELDS)

    def job(self, number: int) -> Any:
        """Return one job."""
        return self._slurm.Job.load(number)

    def node(self, name: str) -> Any:
        """Return one node."""
        return self._slurm.Node.load(name)

    def name(self, job: Any) -> str:
        """Return a job's number."""
        return str(job.id)

    def change_job(self, job: Any, changes: Mapping[str, Any]) -> None:
        """Change a job by one request; an empty text or list clears. Slurm takes a priority only after nodes and CPUs.

        So a job is not released with a request that Slurm has refused to change (job_mgr.c, ``_update_job``).
        """
        sent = {name: BLANK if value in ("", []) else value for name, value in changes.items()}
        job.modify(self._slurm.JobSubmitDescription(**sent))

    def change_node(self, name: str, changes: Mapping[str, str]) -> None:
        """Change a node."""
        self._slurm.Node(name).modify(self._slurm.Node(**changes))


# --- The process ---------------------------------------------------------------------------------------


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Write one line."""
    channel.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def serve(channel: socket.socket, verbs: Verbs) -> None:
    """Answer requests, one after the other, until the other end closes."""
    with channel.makefile("rb") as lines:
        for line in lines:
            send(channel, verbs.answer(json.loads(line)))


def main(arguments: list[str]) -> int:
    """Serve on the file descriptor given; 3 when pyslurm cannot be imported here."""
    channel = socket.socket(fileno=int(arguments[0]))
    os.dup2(2, 1)  # pyslurm prints
    try:
        slurm = importlib.import_module("pyslurm")
    except ImportError as error:
        send(channel, {"lacks": f"pyslurm cannot be imported: {error}"})
        return 3
    source = Pyslurm(slurm)
    send(channel, {"greeting": source.greeting()})
    serve(channel, Verbs(source))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
