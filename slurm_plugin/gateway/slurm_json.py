"""Decoder of Slurm's JSON: jobs, nodes and reservations as the worker around pyslurm returns them (pure).

Source: the data parser v0.0.42 of Slurm 24.11 to 26.05, ``squeue --json`` and ``scontrol show nodes --json``. A job or
node that cannot be decoded costs itself only. Bytes of users need not be UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from cadenza.sidecar import bounds

MAX_RECORDS = 2**20
MAX_HOSTS = 2**16
"""Names that a list of nodes may stand for."""
ERRORS = (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError)
FLAGS = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING",
)  # fmt: skip
"""Flags that stand for a job's state, the first of several (job_state_string() of Slurm's slurm_protocol_defs.c)."""
SHARING = {"none": "NO", "oversubscribe": "YES", "user": "USER", "mcs": "MCS", "topo": "TOPO"}
MB = {"": 1.0, "K": 2.0**-10, "M": 1.0, "G": 2.0**10, "T": 2.0**20, "P": 2.0**30}
COUNTED = re.compile(
    r"(?:^|,)(?P<name>[^,=()]+?)(?:[:=](?P<count>\d{1,12}(?:\.\d{1,6})?)(?P<unit>[KMGTP]?))?(?:\([^)]*\))?(?=,|$)",
    re.ASCII,
)
"""A resource such as ``gres/gpu:a100:2``, ``gpu:a100:4(S:0-1)``, ``mem=62.50G`` in a list."""
HOSTS = re.compile(r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*")
RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)

T = TypeVar("T")
Text: TypeAlias = Annotated[str, Meta(max_length=2**20)]
Words: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=4096)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=int(bounds.MAX_SECONDS))]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]


class Number(Struct, Generic[T], frozen=True):
    """A number that Slurm may leave unset, or that has no limit."""

    set: bool = False
    infinite: bool = False
    number: T | None = None

    @property
    def value(self) -> T | None:
        """Return the number, None without one."""
        return self.number if self.set and not self.infinite else None


class _Signal(Struct, frozen=True):
    id: Number[Count] = Number()


class _Exit(Struct, frozen=True):
    signal: _Signal = _Signal()


class _Job(Struct, frozen=True):
    job_id: bounds.JobId
    job_state: Annotated[Words, Meta(min_length=1)]
    restart_cnt: bounds.Restart = 0
    name: Text = ""
    user_name: Text = ""
    account: Text = ""
    partition: Text = ""
    qos: Text = ""
    state_reason: Text = ""
    state_description: Text = ""
    priority: Number[Count] = Number()
    cpus: Number[Count] = Number()
    cpus_per_task: Number[Count] = Number()
    cpus_per_tres: Text = ""
    minimum_cpus_per_node: Number[Count] = Number()
    tasks: Number[Count] = Number()
    node_count: Number[Count] = Number()
    memory_per_node: Number[bounds.Megabytes] = Number()
    memory_per_cpu: Number[bounds.Megabytes] = Number()
    submit_time: Number[Epoch] = Number()
    eligible_time: Number[Epoch] = Number()
    start_time: Number[Epoch] = Number()
    end_time: Number[Epoch] = Number()
    suspend_time: Number[Epoch] = Number()
    pre_sus_time: Number[Epoch] = Number()
    time_limit: Number[Count] = Number()
    exit_code: _Exit = _Exit()
    comment: Text = ""
    features: Text = ""
    command: Text = ""
    resv_name: Text = ""
    requeue: bool = False
    batch_flag: bool = False
    shared: Words = ()
    flags: Words = ()
    het_job_id: Number[Count] = Number()
    array_job_id: Number[Count] = Number()
    array_task_id: Number[Count] = Number()
    array_task_string: Text = ""
    nodes: Text = ""
    required_nodes: Text = ""
    excluded_nodes: Text = ""
    tres_req_str: Text = ""
    tres_alloc_str: Text = ""
    tres_per_job: Text = ""
    tres_per_node: Text = ""
    tres_per_task: Text = ""


class _Node(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    state: Annotated[Words, Meta(min_length=1)]
    hostname: Text = ""
    reason: Text = ""
    reason_set_by_user: Text = ""
    partitions: Words = ()
    features: Words = ()
    effective_cpus: Count = 0
    cpus: Count = 0
    real_memory: bounds.Megabytes = 0
    alloc_cpus: Count = 0
    alloc_memory: bounds.Megabytes = 0
    free_mem: Number[bounds.Megabytes] = Number()
    gres: Text = ""
    tres_used: Text = ""
    version: Text = ""
    weight: Count = 0
    reason_changed_at: Number[Epoch] = Number()
    slurmd_start_time: Number[Epoch] = Number()


class _Reservation(Struct, frozen=True):
    name: Text
    start_time: Number[Epoch] = Number()
    node_list: Text = ""


class _Jobs(Struct, frozen=True):
    jobs: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_RECORDS)]


class _Nodes(Struct, frozen=True):
    nodes: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_RECORDS)]


class _Reservations(Struct, frozen=True):
    reservations: Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_RECORDS)]


class NotSlurms(Exception):  # noqa: N818
    """The answer as a whole is not Slurm's JSON of this kind."""


def read_jobs(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the jobs of an answer, and why others could not be read; raise NotSlurms."""
    return _records(data, _Jobs, _Job, job_fields)


def read_nodes(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the nodes of an answer, and why others could not be read; raise NotSlurms."""
    return _records(data, _Nodes, _Node, node_fields)


def read_reservations(data: bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the reservations of an answer, and why others could not be read; raise NotSlurms."""
    return _records(data, _Reservations, _Reservation, reservation_fields)


def _records(
    data: bytes, whole: type[Any], kind: type[T], fields: Callable[[T], dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        (raws,) = msgspec.structs.astuple(msgspec.json.decode(data, type=whole))
    except ERRORS as error:
        raise NotSlurms(f"{error}; it begins with {data[:80]!r}") from None
    records: list[dict[str, Any]] = []
    refused: list[str] = []
    for at, raw in enumerate(raws):
        try:
            record, unreadable = _record(bytes(raw), kind)
            records.append(fields(record) | ({"unreadable": unreadable} if unreadable else {}))
        except ERRORS as error:
            refused.append(f"record {at}: {error}")
    return records, refused


def _record(data: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """Return a record, and the names of its texts that are not UTF-8 and were left out."""
    try:
        return msgspec.json.decode(data, type=kind), []
    except UnicodeDecodeError:
        values = json.loads(data.decode("utf-8", "surrogateescape"))
    unreadable = [name for name, value in values.items() if isinstance(value, str) and not _is_utf8(value)]
    return msgspec.convert({name: value for name, value in values.items() if name not in unreadable}, kind), unreadable


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def job_fields(job: _Job) -> dict[str, Any]:
    """Return a job under the names of pyslurm's properties."""
    cpus, nodes = job.cpus.value or 1, job.node_count.value or None
    per_cpu, per_node = job.memory_per_cpu.value or None, job.memory_per_node.value or None
    return {
        "id": job.job_id, "requeue_count": job.restart_cnt, "name": job.name, "user_name": job.user_name,
        "account": job.account, "partition": job.partition, "qos": job.qos, "state": state_of(job.job_state),
        "state_reason": job.state_description or job.state_reason, "priority": job.priority.value, "cpus": cpus,
        "cpus_per_task": None if job.cpus_per_tres else job.cpus_per_task.value or 1,
        "min_cpus_per_node": job.minimum_cpus_per_node.value, "ntasks": job.tasks.value or 1, "num_nodes": nodes,
        "memory": per_cpu * cpus if per_cpu else per_node and per_node * (nodes or 1),
        "memory_per_node": per_node, "memory_per_cpu": per_cpu, "submit_time": job.submit_time.value or None,
        "eligible_time": job.eligible_time.value or None, "start_time": job.start_time.value or None,
        "end_time": job.end_time.value or None, "exit_code_signal": job.exit_code.signal.id.value or 0,
        "suspend_time": job.suspend_time.value or None, "pre_suspension_time": job.pre_sus_time.value or None,
        "time_limit": job.time_limit.value or None, "comment": job.comment,
        "constraints": job.features.split(",") if job.features else [], "command": job.command,
        "reservation": job.resv_name,
        "is_requeueable": job.requeue, "is_batch_job": job.batch_flag,
        "resource_sharing": SHARING.get(job.shared[0], "OK") if job.shared else "OK",
        "heterogeneous_id": job.het_job_id.value or None, "is_cronjob": "CRON_JOB" in job.flags,
        "array_id": job.array_job_id.value or None, "array_task_id": job.array_task_id.value,
        "array_tasks_waiting": job.array_task_string.rpartition("%")[0] or job.array_task_string or None,
        "requested_tres": counts(job.tres_req_str), "allocated_tres": counts(job.tres_alloc_str),
        "tres_per_job": counts(job.tres_per_job), "tres_per_node": counts(job.tres_per_node),
        "tres_per_task": counts(job.tres_per_task),
        "allocated_nodes": hosts(job.nodes), "required_nodes": hosts(job.required_nodes),
        "excluded_nodes": hosts(job.excluded_nodes),
    }  # fmt: skip


def node_fields(node: _Node) -> dict[str, Any]:
    """Return a node under the names of pyslurm's properties."""
    return {
        "name": node.name, "hostname": node.hostname, "state": "+".join(node.state), "reason": node.reason,
        "reason_user": node.reason_set_by_user, "partitions": list(node.partitions),
        "available_features": list(node.features), "effective_cpus": node.effective_cpus, "total_cpus": node.cpus,
        "real_memory": node.real_memory, "allocated_cpus": node.alloc_cpus, "allocated_memory": node.alloc_memory,
        "free_memory": node.free_mem.value, "configured_gres": counts(node.gres),
        "allocated_tres": counts(node.tres_used), "slurm_version": node.version, "weight": node.weight,
        "reason_time": node.reason_changed_at.value or None, "slurmd_start_time": node.slurmd_start_time.value or None,
    }  # fmt: skip


def reservation_fields(one: _Reservation) -> dict[str, Any]:
    """Return a reservation under the names of pyslurm's properties."""
    return {"name": one.name, "start_time": one.start_time.value or None, "nodes": hosts(one.node_list)}


def state_of(states: tuple[str, ...]) -> str:
    """Return the one state that stands for a job's base state and flags.

    >>> state_of(("RUNNING", "COMPLETING"))
    'COMPLETING'
    """
    return next((flag for flag in FLAGS if flag in states), states[0])


def counts(text: str) -> dict[str, int]:
    """Return the resources of a list by name, memory in MB; one without a count is 1.

    >>> counts("cpu=2,mem=62.50G,gres/gpu:a100:3")
    {'cpu': 2, 'mem': 64000, 'gres/gpu:a100': 3}
    """
    found = COUNTED.finditer(text)
    return {one["name"]: int(float(one["count"] or 1) * MB[one["unit"] or ""]) for one in found}


def hosts(text: str) -> list[str]:
    """Return the names of a list of nodes; ValueError for a list that is none, or stands for too many.

    >>> hosts("n[1-2,08-09]x,gpu1-l1")
    ['n1x', 'n2x', 'n08x', 'n09x', 'gpu1-l1']
    """
    names: list[str] = []
    words = HOSTS.findall(text)
    if ",".join(words) != text:
        raise ValueError(f"{text[:80]!r} is no list of nodes")
    for word in words:
        choices = [_numbers(part) if at % 2 else [part] for at, part in enumerate(re.split(r"[\[\]]", word))]
        if len(names) + prod(map(len, choices)) > MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} nodes")
        names += map("".join, product(*choices))
    return names


def _numbers(text: str) -> list[str]:
    """Return the numbers of ranges such as ``1-2,08``, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        found = RANGE.fullmatch(part)
        if found is None:
            raise ValueError(f"{part[:80]!r} is no range of nodes")
        begin, end = int(found[1]), int(found[2] or found[1])
        if end - begin + len(numbers) >= MAX_HOSTS:
            raise ValueError(f"more than {MAX_HOSTS} nodes")
        numbers += [f"{number:0{len(found[1])}d}" for number in range(begin, end + 1)]
    return numbers
