"""The one reader of Slurm's JSON: jobs, nodes and reservations as the worker around pyslurm returns them (pure).

Source: the data parsers v0.0.42 to v0.0.46 of Slurm 24.11 to 26.11, by squeue and scontrol; a file may be of an older
one. A record that cannot be read costs itself only, and is counted by its reason. Bytes of users need not be UTF-8.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from math import isfinite
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, get_origin

import msgspec
from msgspec import Meta, Struct, inspect

from cadenza.policies.core.text import printable
from cadenza.sidecar import bounds
from cadenza.slurm_plugin.gateway.slurm_values import Number, counts, divided_gpus, hosts, state_of, tres

MAX_RECORDS = 10_000_000
MOST_NAMED = 5
ERRORS = (msgspec.MsgspecError, UnicodeError, ValueError, RecursionError)
SHARING = {
    "none": "NO", "true": "NO", "node": "NO", "oversubscribe": "YES", "yes": "YES", "user": "USER", "mcs": "MCS",
    "topo": "TOPO",
}  # fmt: skip
"""Words of ``shared``, up to v0.0.44, and of ``exclusive`` and ``oversubscribe``, which are to come in its place."""
LAST_WITH_SHARED = 44
"""Later versions of the data parser have an empty ``shared``, which says nothing."""
DATA_PARSER = re.compile(rb'"data_parser"\s*:\s*"[^"]{0,64}v0\.0\.(\d{1,4})')
NOTHING = frozenset({"", "NONE", "N/A", "INFINITE", "INFINITY", "UNLIMITED", "INVALID"})
"""Texts for a number that is not there, or has no limit."""
NO_NUMBERS = frozenset({2**32 - 2, 2**32 - 1, 2**64 - 2, 2**64 - 1})
"""The same as plain numbers: NO_VAL and INFINITE of slurm.h."""
SHAPES: dict[object, inspect.Type] = {}
"""The fields of each type of records, which take long to find."""
NUMBERS = (inspect.IntType, inspect.FloatType, inspect.NoneType)

T = TypeVar("T")
R = TypeVar("R")
Fields: TypeAlias = dict[str, Any]
Text: TypeAlias = Annotated[str, Meta(max_length=2**20)]
Words: TypeAlias = Annotated[tuple[Text, ...], Meta(max_length=4096)]
Epoch: TypeAlias = Annotated[int, Meta(ge=0, le=int(bounds.MAX_SECONDS))]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Parts: TypeAlias = dict[str, msgspec.Raw]
Records: TypeAlias = Annotated[tuple[msgspec.Raw, ...], Meta(max_length=MAX_RECORDS)]


class Refused(NamedTuple):
    """One record that was left out."""

    name: str
    """Its own name, or its place."""
    reason: str

    def __str__(self) -> str:
        """Return it as a line of a log."""
        return f"{self.name}: {self.reason}"


def left_out(refused: Iterable[Refused], what: str) -> str:
    """Return a sentence on records that were left out, by reason, the first few named; empty for none.

    >>> left_out([Refused("job 7", "no end"), Refused("job 9", "no end")], "jobs")
    '2 jobs cannot be read: no end (job 7, job 9).'
    """
    by_reason: defaultdict[str, list[str]] = defaultdict(list)
    for one in refused:
        by_reason[one.reason].append(one.name)
    total = sum(map(len, by_reason.values()))
    several = len(by_reason) > 1
    parts = []
    for reason, names in sorted(by_reason.items(), key=lambda item: -len(item[1]))[:MOST_NAMED]:
        more = f" and {len(names) - MOST_NAMED} others" if len(names) > MOST_NAMED else ""
        number = f"{len(names)} with " if several else ""
        parts.append(f"{number}{printable(reason, 200)} ({printable(', '.join(names[:MOST_NAMED]), 200)}{more})")
    more = f"; {len(by_reason) - MOST_NAMED} other reasons" if len(by_reason) > MOST_NAMED else ""
    return f"{total} {what} cannot be read: {'; '.join(parts)}{more}." if total else ""


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
    admin_comment: Text = ""
    features: Text = ""
    command: Text = ""
    resv_name: Text = ""
    requeue: bool = False
    batch_flag: bool = False
    shared: Words = ()
    exclusive: Text | Words = ""
    oversubscribe: Text | Words = ""
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
    tres_per_socket: Text = ""
    sockets_per_node: Number[Count] = Number()
    gres_detail: Words = ()


class _Node(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=256)]
    state: Words = ()
    state_flags: Words = ()
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
    gres_used: Text = ""
    tres_used: Text = ""
    version: Text = ""
    weight: Count = 0
    reason_changed_at: Number[Epoch] = Number()
    slurmd_start_time: Number[Epoch] = Number()


class _Reservation(Struct, frozen=True):
    name: Text
    start_time: Number[Epoch] = Number()
    node_list: Text = ""


class NotSlurms(Exception):  # noqa: N818
    """The answer as a whole is not Slurm's JSON of this kind."""


def read_jobs(data: bytes | str) -> tuple[list[dict[str, Any]], list[Refused]]:
    """Return the jobs of an answer, and those that could not be read; raise NotSlurms."""
    return decode_records(*raw_records(data, "jobs"), "jobs")


def read_nodes(data: bytes | str) -> tuple[list[dict[str, Any]], list[Refused]]:
    """Return the nodes of an answer, and those that could not be read; raise NotSlurms."""
    return decode_records(*raw_records(data, "nodes"), "nodes")


def read_reservations(data: bytes | str) -> tuple[list[dict[str, Any]], list[Refused]]:
    """Return the reservations of an answer, and those that could not be read; raise NotSlurms."""
    return decode_records(*raw_records(data, "reservations"), "reservations")


def decode_records(raws: Sequence[msgspec.Raw], version: int, key: str) -> tuple[list[dict[str, Any]], list[Refused]]:
    """Return the fields of an answer's records, and those that could not be read; ``version``: of the data parser."""
    if key == "jobs":
        told = version <= LAST_WITH_SHARED
        return records(raws, _Job, "job", lambda job, odd: job_fields(job, shared_told=told) | odd)
    if key == "nodes":
        return records(raws, _Node, "node", lambda node, odd: node_fields(node) | odd)
    return records(raws, _Reservation, "reservation", lambda one, odd: reservation_fields(one) | odd)


def raw_records(data: bytes | str, key: str) -> tuple[Sequence[msgspec.Raw], int]:
    """Return the records of an answer, each still encoded, and the number of the data parser, 0 if it does not say.

    ``key``: the records' own, behind those of the objects around them, with points.
    """
    *outer, key = key.split(".")
    found: Sequence[msgspec.Raw] | None
    try:
        parts = msgspec.json.decode(data, type=Parts)
        meta = bytes(parts.get("meta", b""))
        for name in outer:
            parts = msgspec.json.decode(parts.get(name, b"{}"), type=Parts)
        found = msgspec.json.decode(parts.get(key, b"null"), type=Records | None)
    except ERRORS as error:
        found, meta = _tolerant(data, [*outer, key], str(error) if data.strip() else "it is empty")
    if found is None:
        raise NotSlurms(f"it has no {key}; it begins with {data[:80]!r}")
    version = DATA_PARSER.search(meta)
    return found, int(version[1]) if version else 0


def _tolerant(data: bytes | str, keys: Sequence[str], reason: str) -> tuple[list[msgspec.Raw] | None, bytes]:
    """Return the records and the meta data of an answer that is not JSON by its standard.

    Raise NotSlurms, with the reason, for an answer that is no JSON at all.
    """
    # Slurm, and programs that copy its answers, write NaN, halves of a character and control characters: they cost the
    # record that has one.
    try:
        found = json.loads(data if isinstance(data, str) else data.decode("utf-8", "surrogateescape"), strict=False)
        meta = json.dumps(found.get("meta")).encode()
        for key in keys:
            found = found.get(key)
        if found is not None and not isinstance(found, list):
            raise ValueError(reason)
        return found and [msgspec.Raw(json.dumps(one).encode()) for one in found], meta
    except (*ERRORS, AttributeError):
        raise NotSlurms(f"{reason}; it begins with {data[:80]!r}") from None


def records(
    raws: Iterable[msgspec.Raw], kind: type[T], what: str, of: Callable[[T, Fields], R]
) -> tuple[list[R], list[Refused]]:
    """Return the records that can be read, and the others with their reasons.

    ``of`` makes a record's value of it and of its ``unreadable`` texts, if there are some (see ``decoded``).
    """
    found: list[R] = []
    refused: list[Refused] = []
    for at, raw in enumerate(raws):
        try:
            record, unreadable = decoded(bytes(raw), kind)
            found.append(of(record, {"unreadable": unreadable} if unreadable else {}))
        except ERRORS as error:
            refused.append(Refused(name_of(raw, what, at), str(error)))
    return found, refused


def decoded(data: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """Return a record, and the names of its texts that are not UTF-8 and were left out.

    What Slurm writes as null is left out, too: it is the same as nothing.
    """
    try:
        return msgspec.json.decode(data, type=kind), []
    except (UnicodeDecodeError, msgspec.DecodeError):
        values = json.loads(data.decode("utf-8", "surrogateescape"), strict=False)
    if not isinstance(values, dict):
        raise ValueError(f"a record is an object, not {type(values).__name__}")  # noqa: TRY004 (one error for all)
    unreadable = [name for name, value in values.items() if isinstance(value, str) and not _is_utf8(value)]
    values = {name: value for name, value in values.items() if name not in unreadable}
    shape = SHAPES.get(kind) or SHAPES.setdefault(kind, inspect.type_info(kind))
    return msgspec.convert(_fitted(values, shape), kind), unreadable


def _fitted(value: Any, shape: inspect.Type) -> Any:
    """Return a value in the form that is read, for any that Slurm has for it; None for one that says nothing.

    Data parsers up to v0.0.39, and later ones with ``+complex``, have plain numbers in place of ``set``, ``infinite``
    and ``number``; of some fields the former have a text in place of a list, or the other way round.
    """
    kinds = shape.types if isinstance(shape, inspect.UnionType) else (shape,)
    if isinstance(shape, inspect.StructType):
        value = _object(value, shape)
    elif all(isinstance(one, NUMBERS) for one in kinds):
        value = plain_number(value)
    elif isinstance(shape, inspect.VarTupleType):
        if isinstance(value, str) and isinstance(shape.item_type, inspect.StrType):
            value = value.split(",") if value else []
        if isinstance(value, list):
            value = [_fitted(one, shape.item_type) for one in value if one is not None]
    elif isinstance(shape, inspect.StrType):
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            value = ",".join(value)
        value = value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
    elif isinstance(shape, inspect.BoolType) and isinstance(value, dict | int):
        value = bool(plain_number(value))
    return value


def _object(value: Any, shape: inspect.StructType) -> Any:
    """Return an object whose parts are in the form that is read; None for one that says nothing."""
    if get_origin(shape.cls) is Number:
        number = plain_number(value)
        return None if number is None else {"set": True, "number": number}
    if isinstance(value, dict):
        parts = {one.encode_name: _fitted(value.get(one.encode_name), one.type) for one in shape.fields}
        return {name: part for name, part in parts.items() if part is not None}
    # A plain exit code says nothing of the signal, which is a part of it now.
    return None if isinstance(value, int | float) else value


def plain_number(value: Any) -> Any:
    """Return a number without what Slurm has around it; None for one that is not there or has no limit."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") is True and not value.get("infinite") else None
    elif isinstance(value, int | float) and value in NO_NUMBERS:
        value = None
    if isinstance(value, str):
        text = value.strip()
        value = None if text.upper() in NOTHING else int(text) if text.isdecimal() and text.isascii() else value
    if isinstance(value, float):
        value = None if not isfinite(value) else int(value) if value.is_integer() else value
    return value


def name_of(raw: msgspec.Raw, what: str, at: int) -> str:
    """Return the name of a record that may not be readable: its id or name, else its place."""
    try:
        values = json.loads(bytes(raw).decode("utf-8", "replace"))
        name = values.get("job_id", values.get("name"))
    except (*ERRORS, AttributeError):
        name = None
    return f"{what} {printable(str(name), 80)}" if isinstance(name, int | str) else f"{what}s[{at}]"


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def job_fields(job: _Job, *, shared_told: bool = True) -> dict[str, Any]:
    """Return a job under the names of pyslurm's properties, and some that it does not have."""
    cpus, nodes = job.cpus.value or 1, job.node_count.value or None
    per_cpu, per_node = job.memory_per_cpu.value or None, job.memory_per_node.value or None
    return {
        "id": job.job_id, "requeue_count": job.restart_cnt, "name": job.name, "user_name": job.user_name,
        "account": job.account, "partition": job.partition, "qos": job.qos, "state": state_of(job.job_state),
        "base_state": job.job_state[0], "admin_comment": job.admin_comment,
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
        "resource_sharing": _sharing(job, shared_told=shared_told),
        "heterogeneous_id": job.het_job_id.value or None, "is_cronjob": "CRON_JOB" in job.flags,
        "array_id": job.array_job_id.value or None, "array_task_id": job.array_task_id.value,
        "array_tasks_waiting": job.array_task_string.rpartition("%")[0] or job.array_task_string or None,
        "requested_tres": tres(job.tres_req_str), "allocated_tres": tres(job.tres_alloc_str),
        "tres_per_job": counts(job.tres_per_job), "tres_per_node": counts(job.tres_per_node),
        "tres_per_task": counts(job.tres_per_task), "tres_per_socket": counts(job.tres_per_socket),
        "sockets_per_node": job.sockets_per_node.value, "gres_detail": list(job.gres_detail),
        "allocated_nodes": hosts(job.nodes), "required_nodes": hosts(job.required_nodes),
        "excluded_nodes": hosts(job.excluded_nodes),
    }  # fmt: skip


def node_fields(node: _Node) -> dict[str, Any]:
    """Return a node under the names of pyslurm's properties."""
    return {
        "name": node.name, "hostname": node.hostname, "reason": node.reason,
        "reason_user": node.reason_set_by_user, "state": "+".join((*node.state, *node.state_flags)).upper(),
        "partitions": list(node.partitions), "available_features": list(node.features),
        "effective_cpus": node.effective_cpus, "total_cpus": node.cpus,
        "real_memory": node.real_memory, "allocated_cpus": node.alloc_cpus, "allocated_memory": node.alloc_memory,
        "free_memory": node.free_mem.value, "configured_gres": counts(node.gres),
        "allocated_tres": tres(node.tres_used), "allocated_gres": counts(node.gres_used),
        "divided_gpus": divided_gpus(node.gres_used),
        "slurm_version": node.version, "weight": node.weight,
        "reason_time": node.reason_changed_at.value or None, "slurmd_start_time": node.slurmd_start_time.value or None,
    }  # fmt: skip


def reservation_fields(one: _Reservation) -> dict[str, Any]:
    """Return a reservation under the names of pyslurm's properties."""
    return {"name": one.name, "start_time": one.start_time.value or None, "nodes": hosts(one.node_list)}


def _sharing(job: _Job, *, shared_told: bool) -> str | None:
    """Return how a job shares its nodes, by pyslurm's word; None where Slurm does not tell."""
    said = [*job.shared] if shared_told else []
    for word in (job.exclusive, job.oversubscribe):
        said += [word] if isinstance(word, str) else word
    named = [SHARING[word.lower()] for word in said if word.lower() in SHARING]
    return named[0] if named else "OK" if shared_told or any(said) else None
