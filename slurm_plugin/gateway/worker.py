"""The worker process around pyslurm: reads Slurm and changes it, one JSON line for each request.

``python -m cadenza.slurm_plugin.gateway.worker FD`` serves requests on the socket FD until its other end
closes. It is a process of its own because pyslurm is licensed under GPL-2.0, holds the GIL during RPCs, is
not thread-safe, leaks, and may crash. Nothing else imports pyslurm, and this module imports little but the
standard library.

A request is ``{"id": 1, "op": "suspend", …}``, its answer ``{"id": 1, "result": …}`` or
``{"id": 1, "error": {"kind": "slurm"|"stale"|"request", "errno": 2017, "message": …}}``. The first line is a
greeting.
"""

from __future__ import annotations

import importlib
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cadenza.sidecar import clock
from cadenza.slurm_plugin.gateway import request_sizes
from cadenza.slurm_plugin.gateway.request_sizes import BadRequest

JOB_FIELDS = (
    "id", "requeue_count", "name", "user_name", "account", "partition", "qos", "state", "state_reason",
    "priority", "cpus", "cpus_per_task", "ntasks", "num_nodes", "memory", "memory_per_node", "memory_per_cpu",
    "submit_time", "eligible_time", "start_time", "end_time", "exit_code_signal",
    "suspend_time", "pre_suspension_time", "time_limit", "comment", "admin_comment", "constraints", "command",
    "reservation", "is_requeueable", "is_batch_job", "resource_sharing", "heterogeneous_id", "is_cronjob",
    "array_id", "array_task_id", "array_tasks_waiting", "gres_per_node", "requested_tres", "allocated_tres",
    "tres_per_job", "tres_per_node", "tres_per_task",
)  # fmt: skip
NODE_FIELDS = (
    "name", "hostname", "state", "reason", "reason_user", "partitions", "available_features",
    "effective_cpus", "total_cpus", "real_memory", "allocated_cpus", "allocated_memory", "free_memory",
    "configured_gres", "allocated_tres", "slurm_version", "weight", "reason_time", "slurmd_start_time",
)  # fmt: skip
FINISHED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "EXPEDITING", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
})  # fmt: skip
OUR_DRAIN = "cadenza: "
"""Beginning of the reason of all our drains; the service does not undo the drains of others."""

HELD_NOTE = "cadenza: held"
"""Last line of the AdminComment of a job that job_submit.lua holds for us."""
INFINITE = 0xFFFFFFFF
"""The priority by which Slurm releases a held job."""
TERMINATED = ("FAILED", signal.SIGTERM)
"""State and signal of a job whose requeue slurmctld forgot: it calls the job failed by the stop that it had ordered."""

Request = Mapping[str, Any]


class Stale(Exception):  # noqa: N818
    """The request's job or node has changed since it was read."""


class Blank(str):
    """An empty string that pyslurm sends to slurmctld: there, it clears a field.

    pyslurm takes "" for "leave as it is". It looks at ``value[0]`` to decide, and copies up to the first NUL.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> str:
        return "x"


BLANK = Blank("\0")
JSON = "--json=v0.0.42"
"""The version of Slurm's data parser that releases from 24.11 to 26.05 have in common."""


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


class Worker:
    """The verbs; ``slurm`` is the module pyslurm."""

    def __init__(self, slurm: Any) -> None:
        self._slurm = slurm
        self._verbs: dict[str, Callable[[Request], Any]] = {
            "ping": self.ping, "read": self.read, "look": self.look,
            "suspend": self.suspend, "unsuspend": self.unsuspend, "requeue": self.requeue,
            "release": self.release, "modify": self.modify, "resize": self.resize,
            "drain": self.drain, "undrain": self.undrain,
        }  # fmt: skip

    def greeting(self) -> dict[str, Any]:
        """Return the worker's pyslurm version, pid and user."""
        user = pwd.getpwuid(os.geteuid()).pw_name
        return {"pyslurm": self._slurm.__version__, "pid": os.getpid(), "user": user}

    def answer(self, request: Request) -> dict[str, Any]:
        """Carry out one request; every failure is an answer."""
        number = request.get("id")
        try:
            verb = self._verbs[request["op"]]
        except KeyError:
            return failure(number, "request", f"unknown request {request.get('op')!r}")
        try:
            return {"id": number, "result": verb(request)}
        except self._slurm.RPCError as error:
            return failure(number, "slurm", str(error.msg), error.errno)
        except Stale as error:
            return failure(number, "stale", str(error))
        except (BadRequest, LookupError, TypeError, ValueError) as error:
            return failure(number, "request", f"{type(error).__name__}: {error}")

    def ping(self, _request: Request) -> dict[str, Any]:
        """Ping the primary slurmctld; ``latency_ms`` is the RPC's time."""
        answer = self._slurm.slurmctld.ping_primary()
        return {"host": answer.hostname, "responding": answer.is_responding, "latency_ms": answer.latency}

    def read(self, _request: Request) -> dict[str, Any]:
        """Return nodes, reservations, and jobs that have not finished or were terminated; times in s of the epoch."""
        jobs = self._slurm.Jobs.load(preload_passwd_info=True)
        nodes = self._slurm.Nodes.load()
        drained = any("DRAIN" in node.state for node in nodes.values())
        held = any(job.priority == 0 and job.state == "PENDING" and job.requeue_count for job in jobs.values())
        terminated = [job for job in jobs.values() if (job.state, job.exit_code_signal) == TERMINATED]
        return {
            "schema": "cadenza.recording/1",
            "time_s": clock.now(),
            "slurmctld_start_time": self._slurm.slurmctld.Config.load().slurmctld_boot_time
            if drained or held or terminated
            else None,
            "jobs": [
                *(self._job(job) for job in jobs.values() if job.state not in FINISHED),
                *(self._job(job) for job in terminated),
            ],
            "nodes": [read_fields(node, NODE_FIELDS) for node in nodes.values()],
            "reservations": [
                {"name": one.name, "start_time": one.start_time, "nodes": self._hosts(one.nodes)}
                for one in self._slurm.Reservations.load().values()
            ],
        }

    def look(self, request: Request) -> list[dict[str, Any]]:
        """Return the state of the jobs with these ids, one small RPC each, without those that Slurm does not know."""
        states = (self._glimpse(int(number)) for number in request["jobs"])
        return [state for state in states if state is not None]

    def _glimpse(self, number: int) -> dict[str, Any] | None:
        try:
            job = self._slurm.Job.load(number)
        except self._slurm.RPCError:
            return None
        return {
            "id": number,
            "restart": job.requeue_count,
            "state": job.state,
            "priority": job.priority,
            "eligible_time": job.eligible_time,
            "time_s": clock.now(),
        }

    def _job(self, job: Any) -> dict[str, Any]:
        lists = ("allocated_nodes", "required_nodes", "excluded_nodes")
        return read_fields(job, JOB_FIELDS) | {name: self._hosts(getattr(job, name)) for name in lists}

    def _hosts(self, text: str | None) -> list[str]:
        if not text:
            return []
        if "[" not in text:
            return text.split(",")
        return list(self._slurm.utils.helpers.nodelist_from_range_str(text))

    # --- Jobs ------------------------------------------------------------------------------------------

    def _job_in(self, request: Request, *states: str) -> Any:
        """Return the request's job after making sure that it is the incarnation meant, in one of ``states``.

        Slurm's verbs know a job by its id alone, which a requeued job keeps.
        """
        number, restart = int(request["job"]), int(request["restart"])
        job = self._slurm.Job.load(number)
        if job.requeue_count != restart:
            raise Stale(f"job {number} has been requeued: it is at restart {job.requeue_count}")
        if job.state not in states:
            raise Stale(f"job {number} is {job.state}, not {' or '.join(states)}")
        return job

    def suspend(self, request: Request) -> None:
        """Suspend a running job."""
        self._job_in(request, "RUNNING").suspend()

    def unsuspend(self, request: Request) -> None:
        """Resume a suspended job."""
        self._job_in(request, "SUSPENDED").unsuspend()

    def requeue(self, request: Request) -> None:
        """Requeue a job, with ``hold`` into held state; Slurm kills it with no grace but KillWait.

        With ``failed`` only one that has failed.
        """
        states = ("FAILED",) if request.get("failed") else ("RUNNING", "SUSPENDED", "CONFIGURING")
        self._job_in(request, *states).requeue(hold=bool(request["hold"]))

    def release(self, request: Request) -> None:
        """Release a held job, after clearing its node list if ``unpin``; a job that is not held stays as it is.

        The note of job_submit.lua's hold goes by the same request: a slurmctld that is killed forgets both or neither,
        so the note tells our hold from a later one of the owner's.
        """
        job = self._job_in(request, "PENDING")
        if request.get("unpin") and job.required_nodes:
            job.modify(self._slurm.JobSubmitDescription(required_nodes=BLANK))
        if job.priority:
            return
        own, _, note = (read_field(job, "admin_comment")[0] or "").rpartition("\n")
        if note == HELD_NOTE:
            job.modify(self._slurm.JobSubmitDescription(priority=INFINITE, admin_comment=own or BLANK))
        else:
            job.release()

    def modify(self, request: Request) -> None:
        """Change a pending job: ``nodes`` (empty clears), ``cpus_per_task``, ``memory_per_node`` in MB.

        Other values stay. ``cpus`` and ``memory`` are totals instead, rounded up to whole CPUs a task
        and MB a node; ``as_far_as_possible`` leaves CPUs alone that cannot be changed. ``now`` lets it start at once.
        """
        job = self._job_in(request, "PENDING")
        changes: dict[str, Any] = {}
        if "nodes" in request:
            changes["required_nodes"] = list(request["nodes"]) or BLANK
        if "memory_per_node" in request:
            changes["memory_per_node"] = int(request["memory_per_node"])
        elif "memory" in request:
            changes["memory_per_node"] = -(-int(request["memory"]) // (job.num_nodes or 1))
        if "cpus_per_task" in request:
            changes |= cpu_changes(job, int(request["cpus_per_task"]))
        elif "cpus" in request and (job.cpus_per_task is not None or not request.get("as_far_as_possible")):
            changes |= cpu_changes(job, -(-int(request["cpus"]) // (job.ntasks or 1)))
        if request.get("now"):
            changes["begin_time"] = int(clock.now())
        job.modify(self._slurm.JobSubmitDescription(**changes))

    def resize(self, request: Request) -> None:
        """Give a pending job other numbers of nodes and GPUs, and CPUs, memory and tasks with them.

        ``shares`` has ``node``, ``gpus``, ``cpus`` and ``memory_mb`` of each node, equal but for the node; ``now`` lets
        it start at once.
        """
        job = self._job_in(request, "PENDING")
        shown = request_sizes.shown_job(scontrol("show", "job", str(job.id), JSON), int(job.id))
        now = ("StartTime=now",) if request.get("now") else ()
        scontrol("update", f"JobId={job.id}", *request_sizes.changes(shown, request["shares"]), *now)

    # --- Nodes -----------------------------------------------------------------------------------------

    def drain(self, request: Request) -> None:
        """Drain a node with ``reason``; the drain of another user stays."""
        node = self._slurm.Node.load(request["node"])
        if "DRAIN" in node.state:
            raise Stale(f"node {node.name} is drained already: {node.reason}")
        reason = str(request["reason"]).removeprefix(OUR_DRAIN)
        self._change(node.name, state="DRAIN", reason=OUR_DRAIN + reason)

    def undrain(self, request: Request) -> None:
        """Open a node that we drained, or that Slurm drained with the reason ``drain``."""
        node = self._slurm.Node.load(request["node"])
        if "DRAIN" not in node.state:
            return
        expected = str(request.get("drain") or "")
        if node.reason != expected if expected else not (node.reason or "").startswith(OUR_DRAIN):
            raise Stale(f"node {node.name} was drained by {node.reason_user}: {node.reason}")
        self._change(node.name, state="UNDRAIN")

    def _change(self, name: str, **changes: Any) -> None:
        self._slurm.Node(name).modify(self._slurm.Node(**changes))


def cpu_changes(job: Any, cpus_per_task: int) -> dict[str, int]:
    """Return the changes that give a pending job ``cpus_per_task``; lower its least CPUs on a node first if needed.

    Slurm keeps three numbers that must agree, or it finds the job unrunnable (BadConstraints) when released:
    CPUs per task, CPUs of the job, which pyslurm's ``min_cpus_per_node`` sets in spite of its name, and least
    CPUs on a node, which pyslurm cannot set at all.
    """
    if job.cpus_per_task is None:
        raise BadRequest(f"job {job.id} asked for --cpus-per-gpu: its CPUs cannot be changed")
    if (job.min_cpus_per_node or 0) > cpus_per_task:
        scontrol("update", f"JobId={job.id}", f"MinCPUsNode={cpus_per_task}")
    return {"cpus_per_task": cpus_per_task, "min_cpus_per_node": cpus_per_task * job.ntasks}


def scontrol(*arguments: str) -> str:
    """Run scontrol for a change that pyslurm lacks, and return its output; BadRequest when it refuses."""
    done = subprocess.run(
        ["scontrol", *arguments], capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=20,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise BadRequest(f"scontrol {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


# --- The process ---------------------------------------------------------------------------------------


def failure(number: Any, kind: str, message: str, errno: int | None = None) -> dict[str, Any]:
    """Return the answer to a request that failed."""
    return {"id": number, "error": {"kind": kind, "message": message, "errno": errno}}


def send(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Write one line."""
    channel.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def serve(channel: socket.socket, worker: Worker) -> None:
    """Answer requests, one after the other, until the other end closes."""
    with channel.makefile("rb") as lines:
        for line in lines:
            send(channel, worker.answer(json.loads(line)))


def main(arguments: list[str]) -> int:
    """Serve on the file descriptor given; 3 when pyslurm cannot be imported here."""
    channel = socket.socket(fileno=int(arguments[0]))
    os.dup2(2, 1)  # pyslurm prints
    try:
        slurm = importlib.import_module("pyslurm")
    except ImportError as error:
        send(channel, {"lacks": f"pyslurm cannot be imported: {error}"})
        return 3
    worker = Worker(slurm)
    send(channel, {"greeting": worker.greeting()})
    serve(channel, worker)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
