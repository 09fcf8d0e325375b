"""The requests that the gateway sends to a source of Slurm: the same checks, changes and refusals for each source.

A request is ``{"op": "suspend", …}``, its answer ``{"result": …}`` or
``{"error": {"kind": "slurm"|"stale"|"request", "errno": 2017, "message": …}}``; an ``id`` comes back with the answer.
This module imports the standard library and little else, because the worker around pyslurm runs it.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from typing import Any, Generic, Protocol, TypeVar

from cadenza.sidecar import clock
from cadenza.slurm_plugin.gateway.commands import Refusal, command, json_answer
from cadenza.slurm_plugin.gateway.site_rules import SiteReader

FINISHED = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
    "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "REVOKED", "TIMEOUT",
})  # fmt: skip
OUR_DRAIN = "cadenza: "
"""Beginning of the reason of all our drains; the service does not undo the drains of others."""
INFINITE = 0xFFFFFFFF
"""The priority by which Slurm releases a held job."""
TERMINATED = ("FAILED", signal.SIGTERM)
"""State and signal of a job whose requeue slurmctld forgot: it calls the job failed by the stop that it had ordered."""
REQUEUE_DELAY_S = 125.0
"""Slurm keeps a requeued job from starting for less; 121 s where there is no ``requeue_delay`` (24.11)."""
MIN_DELAY_S = 2.0
NODES_S = 5.0
"""Nodes are read again after this long even if no job started, stopped or ended: their own state may have changed. Each
read is two RPCs over pyslurm, which asks for the partitions, too."""
RARE_S = 10.0
"""The same for reservations and the start of slurmctld, which change rarely."""
SITE_S = 60.0
"""The same for the site's rules on priorities: Slurm itself adds up the use of shares every five minutes."""

Request = Mapping[str, Any]
T = TypeVar("T")


class BadRequest(Exception):  # noqa: N818
    """The request itself is wrong."""


class Stale(Exception):  # noqa: N818
    """The request's job or node has changed since it was read."""


class Slurm(Protocol):
    """One way to talk to Slurm. Its jobs and nodes are objects with the names of pyslurm's properties.

    A job also has the verbs ``suspend()``, ``unsuspend()`` and ``requeue(hold=…)``.
    """

    error: type[Exception]
    """Slurm's refusal of a request, with ``msg`` and ``errno``."""

    def ping(self) -> dict[str, Any]:
        """Return slurmctld's ``host``, ``responding``, and ``latency_ms`` of the request."""
        ...

    def jobs(self) -> Iterable[Any]:
        """Return all jobs that slurmctld knows, finished ones too."""
        ...

    def nodes(self) -> Iterable[Any]:
        """Return all nodes."""
        ...

    def reservations(self) -> list[dict[str, Any]]:
        """Return all reservations: ``name``, ``start_time``, ``nodes``."""
        ...

    def started_s(self) -> float:
        """Return when slurmctld started, seconds of the epoch."""
        ...

    def job_fields(self, job: Any) -> dict[str, Any]:
        """Return a job as ``translate`` reads it."""
        ...

    def node_fields(self, node: Any) -> dict[str, Any]:
        """Return a node as ``translate`` reads it."""
        ...

    def job(self, number: int) -> Any:
        """Return one job."""
        ...

    def node(self, name: str) -> Any:
        """Return one node."""
        ...

    def name(self, job: Any) -> str:
        """Return the name of a job for scontrol."""
        ...

    def change_job(self, job: Any, changes: Mapping[str, Any]) -> None:
        """Change a job; an empty text or list clears. With ``priority`` release it, unless another change is refused.

        Names are those of pyslurm, where ``min_cpus_per_node`` sets the job's number of CPUs.
        """
        ...

    def change_node(self, name: str, changes: Mapping[str, str]) -> None:
        """Change a node's ``state`` and ``reason``."""
        ...


class Kept(Generic[T]):
    """An answer of Slurm that serves several requests: until it is too old, or what it depends on has changed."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._answer: T | None = None
        self._until_s = -inf
        self._depends_on: object = None

    def get(self, read: Callable[[], T], depends_on: object = None) -> T:
        """Return the answer, read anew if need be."""
        now_s = clock.monotonic()
        if self._answer is None or now_s >= self._until_s or depends_on != self._depends_on:
            self._answer = read()
            self._until_s, self._depends_on = now_s + self._longest_s, depends_on
        return self._answer

    def shorten(self, longest_s: float) -> None:
        """Keep the answer for no longer than this from now on."""
        self._until_s = min(self._until_s, clock.monotonic() + longest_s)

    def forget(self) -> None:
        """Read anew at the next request."""
        self._answer = None


class Verbs:
    """The verbs over one source."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._nodes: Kept[list[dict[str, Any]]] = Kept(NODES_S)
        self._reservations: Kept[list[dict[str, Any]]] = Kept(RARE_S)
        self._started_s: Kept[float] = Kept(RARE_S)
        self._site, self._reader = Kept[dict[str, Any]](SITE_S), SiteReader()
        self._verbs: dict[str, Callable[[Request], Any]] = {
            "ping": self.ping, "read": self.read, "look": self.look,
            "suspend": self.suspend, "unsuspend": self.unsuspend, "requeue": self.requeue,
            "factor": self.factor, "make_way": self.make_way,
            "release": self.release, "size": self.size, "place": self.place, "resize": self.resize,
            "drain": self.drain, "undrain": self.undrain,
        }  # fmt: skip

    def answer(self, request: Request) -> dict[str, Any]:
        """Carry out one request; every failure is an answer."""
        number = request.get("id")
        try:
            verb = self._verbs[request["op"]]
        except KeyError:
            return failure(number, "request", f"unknown request {request.get('op')!r}")
        try:
            return {"id": number, "result": verb(request)}
        except (Refusal, self._slurm.error) as error:
            # Read everything anew, because slurmctld may be another one by then.
            for kept in (self._nodes, self._reservations, self._started_s):
                kept.forget()
            return failure(number, "slurm", str(getattr(error, "msg", error)), getattr(error, "errno", None))
        except Stale as error:
            return failure(number, "stale", str(error))
        except (BadRequest, LookupError, TypeError, ValueError) as error:
            return failure(number, "request", f"{type(error).__name__}: {error}")

    def ping(self, _request: Request) -> dict[str, Any]:
        """Ping the primary slurmctld."""
        return self._slurm.ping()

    def read(self, _request: Request) -> dict[str, Any]:
        """Return nodes, reservations, and jobs that have not finished or were terminated; times in s of the epoch.

        slurmctld is asked for all jobs each time, for the rest only on need.
        """
        jobs = list(self._slurm.jobs())
        nodes = self._nodes.get(lambda: [self._slurm.node_fields(node) for node in self._slurm.nodes()], seated(jobs))
        # The start of slurmctld tells what its restart did to these from what an admin did, and is an RPC of its own.
        drained = any("DRAIN" in node["state"] for node in nodes)
        held = any(job.priority == 0 and job.state == "PENDING" and job.requeue_count for job in jobs)
        terminated = [job for job in jobs if (job.state, job.exit_code_signal) == TERMINATED]
        started_s = self._started_s.get(self._slurm.started_s) if drained or held or terminated else None
        # slurmctld shows finished jobs for MinJobAge, 300 s by default, and a busy site has thousands of them.
        shown = [*(job for job in jobs if job.state not in FINISHED), *terminated]
        return {
            "schema": "cadenza.recording/1",
            "time_s": clock.now(),
            "slurmctld_start_time": started_s,
            "jobs": [self._slurm.job_fields(job) for job in shown],
            "nodes": nodes,
            "reservations": self._reservations.get(self._slurm.reservations),
            "site": self._site_rules(),
        }

    def _site_rules(self) -> dict[str, Any]:
        """Return the site's rules; parts that were never read are asked for again soon."""
        rules = self._site.get(self._reader.read)
        if rules["unread"]:
            self._site.shorten(RARE_S)
        return rules

    def look(self, request: Request) -> list[dict[str, Any]]:
        """Return the state of the jobs with these ids, one small RPC each, without those that Slurm does not know."""
        states = (self._glimpse(int(number)) for number in request["jobs"])
        return [state for state in states if state is not None]

    def _glimpse(self, number: int) -> dict[str, Any] | None:
        try:
            job = self._slurm.job(number)
        except self._slurm.error:
            return None
        return {
            "id": number,
            "restart": job.requeue_count,
            "state": job.state,
            "priority": job.priority,
            "eligible_time": job.eligible_time,
            "time_s": clock.now(),
        }

    # --- Jobs ------------------------------------------------------------------------------------------

    def _job_in(self, request: Request, *states: str) -> Any:
        """Return the request's job after making sure that it is the incarnation meant, in one of ``states``.

        Slurm's verbs know a job by its id alone, which a requeued job keeps.
        """
        number, restart = int(request["job"]), int(request["restart"])
        job = self._slurm.job(number)
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
        # Slurm requeues a finished job, too: one that ended just before the request would run a second time.
        self._job_in(request, *states).requeue(hold=bool(request["hold"]))

    def factor(self, request: Request) -> None:
        """Set the SiteFactor of a job, which counts now and when it is requeued; of an array, of the tasks that wait.

        It is scontrol's matter for each source: pyslurm takes 0 for "leave as it is".
        """
        job = self._job_in(request, "PENDING", "RUNNING", "SUSPENDED", "CONFIGURING")
        _set_factor([job], int(request["factor"]))

    def make_way(self, request: Request) -> list[str]:
        """Set the SiteFactor of running jobs and requeue them by one command; return why others of them were left out.

        One that is no longer the incarnation meant has left already.
        """
        going: dict[int, list[Any]] = {}
        left_out: list[str] = []
        for one in request["jobs"]:
            try:
                job = self._job_in(one, "RUNNING")
            except (Stale, self._slurm.error) as error:
                left_out.append(str(getattr(error, "msg", error)))
            else:
                going.setdefault(int(one["factor"]), []).append(job)
        if not going:
            raise Stale("; ".join(left_out) or "no job was named")
        for factor, jobs in going.items():
            # A requeue keeps the SiteFactor: as soon as a job is back, it is behind the one that waits.
            _set_factor(jobs, factor)
        # All go by one command: between two requeues Slurm could give what the first one frees to another job than the
        # one that it is for.
        command("scontrol", "requeue", ",".join(scontrol_name(job) for jobs in going.values() for job in jobs))
        return left_out

    def release(self, request: Request) -> None:
        """Release a held job, after clearing its node list if ``unpin``; a job that is not held stays as it is."""
        job = self._job_in(request, "PENDING")
        self._start(job, {"required_nodes": []} if request.get("unpin") and job.required_nodes else {})

    def place(self, request: Request) -> None:
        """Change a pending job as ``size`` does, and its ``nodes``, and release it; ``now`` lets it start at once."""
        job = self._job_in(request, "PENDING")
        changes: dict[str, Any] = {"required_nodes": list(request["nodes"])} if request.get("nodes") else {}
        changes |= self._size_changes(job, request)
        if request.get("now"):
            changes["begin_time"] = int(clock.now())
        self._start(job, changes)

    def _start(self, job: Any, changes: dict[str, Any]) -> None:
        """Change a pending job, and release it by the same request if it is held.

        One that Slurm delays because it was requeued may start at once.
        """
        # A hold is a priority of 0 in Slurm, whoever ordered it.
        if not job.priority:
            # A requeue sets a begin time: by requeue_delay (25.11), else two minutes ahead, for the old credential.
            if delayed_by_requeue(job, clock.now()):
                changes["begin_time"] = int(clock.now())
            changes["priority"] = INFINITE
        if changes:
            self._slurm.change_job(job, changes)

    def size(self, request: Request) -> None:
        """Change a pending job: ``cpus_per_task``, ``memory_per_node`` in MB; other values stay.

        ``cpus`` and ``memory`` are totals instead, rounded up to whole CPUs a task and MB a node.
        ``as_far_as_possible`` leaves CPUs alone that cannot be changed.
        """
        job = self._job_in(request, "PENDING")
        self._slurm.change_job(job, self._size_changes(job, request))

    def _size_changes(self, job: Any, request: Request) -> dict[str, Any]:
        changes: dict[str, Any] = {}
        if "memory_per_node" in request:
            changes["memory_per_node"] = int(request["memory_per_node"])
        elif "memory" in request:
            # Slurm has no memory of a job as a whole: a request is for each node, or for each CPU.
            changes["memory_per_node"] = -(-int(request["memory"]) // (job.num_nodes or 1))
        if "cpus_per_task" in request:
            changes |= self._cpu_changes(job, int(request["cpus_per_task"]))
        elif "cpus" in request and (job.cpus_per_task is not None or not request.get("as_far_as_possible")):
            changes |= self._cpu_changes(job, -(-int(request["cpus"]) // (job.ntasks or 1)))
        return changes

    def resize(self, request: Request) -> None:
        """Give a pending job other numbers of nodes and GPUs, and CPUs, memory and tasks with them, and release it.

        ``shares`` has ``node``, ``gpus``, ``cpus`` and ``memory_mb`` of each node, equal but for the node; ``now`` lets
        it start at once.
        """
        job = self._job_in(request, "PENDING")
        text = json_answer("scontrol", "show", "job", str(job.id)).decode("utf-8", "surrogateescape")
        shown = shown_job(text, int(job.id))
        now = ("StartTime=now",) if request.get("now") else ()
        name = f"JobId={self._slurm.name(job)}"
        command("scontrol", "update", name, *size_changes(shown, request["shares"]), *now)
        # The release is a request of its own: a job whose change was refused must not start in its old size.
        self._start(job, {})

    def _cpu_changes(self, job: Any, cpus_per_task: int) -> dict[str, int]:
        """Return the changes for ``cpus_per_task`` of a pending job; lower its least CPUs on a node first if needed."""
        if job.cpus_per_task is None:
            raise BadRequest(f"job {job.id} asked for --cpus-per-gpu: its CPUs cannot be changed")
        # Slurm keeps three numbers that must agree, or it finds the job unrunnable (BadConstraints) when released: CPUs
        # per task, CPUs of the job, and least CPUs on a node, which pyslurm cannot set at all.
        if (job.min_cpus_per_node or 0) > cpus_per_task:
            command("scontrol", "update", f"JobId={self._slurm.name(job)}", f"MinCPUsNode={cpus_per_task}")
        # In spite of its name pyslurm's ``min_cpus_per_node`` sets the CPUs of the job.
        return {"cpus_per_task": cpus_per_task, "min_cpus_per_node": cpus_per_task * job.ntasks}

    # --- Nodes -----------------------------------------------------------------------------------------

    def drain(self, request: Request) -> None:
        """Drain a node with ``reason``; the drain of another user stays."""
        node = self._slurm.node(request["node"])
        if "DRAIN" in node.state:
            # A second drain would replace the reason, by which the first one is known as an admin's.
            raise Stale(f"node {node.name} is drained already: {node.reason}")
        reason = str(request["reason"]).removeprefix(OUR_DRAIN)
        self._nodes.forget()
        self._slurm.change_node(node.name, {"state": "DRAIN", "reason": OUR_DRAIN + reason})

    def undrain(self, request: Request) -> None:
        """Open a node that we drained, or that Slurm drained with the reason ``drain``."""
        node = self._slurm.node(request["node"])
        if "DRAIN" not in node.state:
            return
        # A node has one drain, and only its reason tells whose it is.
        expected = str(request.get("drain") or "")
        if node.reason != expected if expected else not (node.reason or "").startswith(OUR_DRAIN):
            raise Stale(f"node {node.name} was drained by {node.reason_user}: {node.reason}")
        self._nodes.forget()
        self._slurm.change_node(node.name, {"state": "UNDRAIN"})


def seated(jobs: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return the facts of jobs on which the use of nodes depends."""
    seats = ((job.id, job.requeue_count, job.state, job.allocated_nodes) for job in jobs)
    return [seat for seat in seats if seat[2] != "PENDING" and seat[2] not in FINISHED]


def scontrol_name(job: Any) -> str:
    """Return the name of a job for scontrol; of the rest of an array that waits, of all tasks of that rest.

    The number of an array's last task, and of its rest, is the array's own, by which scontrol would change every task.
    """
    if not job.array_id:
        return str(job.id)
    rest = (job.array_tasks_waiting or "").partition("%")[0]
    return f"{job.array_id}_[{rest}]" if rest else f"{job.array_id}_{job.array_task_id or 0}"


def _set_factor(jobs: Sequence[Any], factor: int) -> None:
    command("scontrol", "update", f"JobId={','.join(map(scontrol_name, jobs))}", f"SiteFactor={factor}")


def delayed_by_requeue(job: Any, now_s: float) -> bool:
    """Return True if a job must not start yet for no other reason than its requeue, which submits it anew."""
    eligible_s, submit_s = float(job.eligible_time or 0), float(job.submit_time or 0)
    # A begin time that is further from the submission is the user's own (sbatch --begin), and stands.
    return bool(job.requeue_count) and eligible_s - now_s > MIN_DELAY_S and eligible_s - submit_s <= REQUEUE_DELAY_S


def failure(number: Any, kind: str, message: str, errno: int | None = None) -> dict[str, Any]:
    """Return the answer to a request that failed."""
    return {"id": number, "error": {"kind": kind, "message": message, "errno": errno}}


# --- The request of a pending job for other numbers of GPUs and nodes (no I/O) ------------------------------


def shown_job(text: str, number: int) -> Mapping[str, Any]:
    """Return a job of the output of ``scontrol show job --json``; BadRequest when it is not there.

    Only JSON tells Slurm's fields from texts of users: in lines of ``name=value`` a job's name can hold any field.
    """
    try:
        jobs = json.loads(text)["jobs"]
        return next(job for job in jobs if job["job_id"] == number)
    except (ValueError, LookupError, TypeError, RecursionError, StopIteration):
        raise BadRequest(f"Slurm's JSON does not show job {number}") from None


def size_changes(shown: Mapping[str, Any], shares: list[dict[str, Any]]) -> list[str]:
    """Return the arguments of ``scontrol update`` that give a job these shares; ``shown``: see ``shown_job``.

    pyslurm cannot change NumNodes, MinCPUsNode and TresPerJob of a job. One task a node stays one task a node (as
    torchrun wants it), one task a GPU one a GPU; other jobs, and those with ``--gpus-per-task`` or ``--cpus-per-gpu``,
    are refused, because the spread of their tasks is not fields.
    """
    if len({(share["gpus"], share["cpus"], share["memory_mb"]) for share in shares}) != 1:
        raise BadRequest("its nodes would not get the same, which Slurm cannot be asked for")
    for name, option in (("tres_per_task", "--gpus-per-task"), ("cpus_per_tres", "--cpus-per-gpu")):
        if "gpu" in shown.get(name, ""):
            raise BadRequest(f"it asked for {option} ({shown[name]}): its size cannot be changed")
    nodes, share = len(shares), shares[0]
    tasks = tasks_a_node(shown, share["gpus"])
    wanted = {
        "NumNodes": f"{nodes}-{nodes}", "NumTasks": nodes * tasks, "NumCPUs": nodes * share["cpus"],
        "MinCPUsNode": share["cpus"], "CPUsPerTask": max(1, share["cpus"] // tasks),
        "MinMemoryNode": share["memory_mb"], "ReqNodeList": ",".join(one["node"] for one in shares),
    }  # fmt: skip
    # A job that was submitted with --gpus refuses GPUs for each node (Invalid GRES specification).
    if shown.get("tres_per_job"):
        wanted["TresPerJob"] = f"gres/gpu:{nodes * share['gpus']}"
    else:
        wanted["TresPerNode"] = f"gres/gpu:{share['gpus']}"
    return [f"{name}={value}" for name, value in wanted.items()]


def tasks_a_node(shown: Mapping[str, Any], gpus: int) -> int:
    """Return the tasks that each node gets with ``gpus`` GPUs; BadRequest when the job's tasks follow neither."""
    nodes, tasks = int(shown["node_count"]["number"]), int(shown["tasks"]["number"])
    if tasks == nodes:
        return 1
    counts = dict(item.partition("=")[::2] for item in shown.get("tres_req_str", "").split(","))
    if str(tasks) == counts.get("gres/gpu"):
        return gpus
    raise BadRequest(f"its {tasks} tasks are neither one a node nor one a GPU: its size cannot be changed")
