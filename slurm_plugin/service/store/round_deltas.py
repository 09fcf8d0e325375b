"""A round as its difference from a key frame, an earlier round that is on record as a whole (pure).

Of 60,000 jobs most wait as they did, and of those that run a few values change. A round refers to its key frame only,
so that any round in between may be deleted. Equal values give equal bytes, and what is read is what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from operator import attrgetter
from typing import Any, Self, TypeVar, Union, get_type_hints

import msgspec
from msgspec import UNSET, UnsetType

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import (
    ClusterSnapshot,
    Host,
    Job,
    JobKey,
    Lease,
    Node,
    Progress,
    SiteRules,
    changed,
)
from cadenza.slurm_plugin.service.store import record_codec
from cadenza.slurm_plugin.service.store.record_codec import Profiled, SnapshotRow

T = TypeVar("T")
Changes = dict[str, Any]


class Frame:
    """A key frame with the rows that others are compared with."""

    def __init__(self, number: int, snapshot: ClusterSnapshot, reasons: Mapping[JobKey, str]) -> None:
        self.number, self.reasons = number, reasons
        self.jobs = snapshot.by_key
        self.nodes = {node.name: node for node in snapshot.nodes}
        self.hosts = {host.name: host for host in snapshot.hosts}
        self.usable = _in_order(snapshot)

    @classmethod
    def of(cls, row: Any) -> Self:
        """Return the key frame of a row of the store."""
        snapshot = record_codec.decode_snapshot(record_codec.unpack(row["snapshot"]))
        return cls(row["number"], snapshot, record_codec.decode_decision(record_codec.unpack(row["decision"])).reasons)


def read_round(row: Any, frame: Frame | None) -> tuple[ClusterSnapshot, Memory, Decision, Memory]:
    """Return a row's snapshot, memory before, decision and memory; ``frame``: the one that it is told from."""
    snapshot, before, decision, memory = (
        record_codec.unpack(row[name]) for name in ("snapshot", "before", "decision", "memory")
    )
    after = record_codec.decode_memory(memory)
    if frame is None:
        decided = record_codec.decode_decision(decision)
        return record_codec.decode_snapshot(snapshot), record_codec.decode_memory(before), decided, after
    decided = decode_decision(decision, after, frame)
    return decode_snapshot(snapshot, frame), decode_memory(before, after), decided, after


def _changes_of(kind: type, but: Collection[str] = (), **more: Any) -> Any:
    """Return a struct with the fields of a dataclass, and more, each of which may be left out."""
    hints = {name: hint for name, hint in get_type_hints(kind, include_extras=True).items() if name not in but}
    rows = [(name, Union[hint, UnsetType], UNSET) for name, hint in (hints | more).items()]  # noqa: UP007
    return msgspec.defstruct(f"_{kind.__name__}Changes", rows, frozen=True)


PARTS: Mapping[str, type] = {"lease": Lease, "progress": Progress}
"""Fields of a job whose own fields are told apart."""
_PARTS = {name: _changes_of(kind) for name, kind in PARTS.items()}
_Changes = _changes_of(Job, ("profile",), **{f"in_{name}": kind for name, kind in _PARTS.items()})
"""Fields of a job that differ, and those of its lease and its progress; the key tells which job."""
_NAMES = tuple(field.name for field in fields(Job) if field.name not in ("key", "profile"))
_NAMES_OF = {_Changes: _NAMES} | {
    _PARTS[name]: tuple(field.name for field in fields(kind)) for name, kind in PARTS.items()
}
_VALUES = {kind: attrgetter(*names) for kind, names in _NAMES_OF.items()}


class _SnapshotDelta(msgspec.Struct, frozen=True):
    time_s: float
    site: SiteRules
    jobs: tuple[_Changes, ...]  # type: ignore[valid-type] # made above
    new_jobs: tuple[Job, ...]
    gone_jobs: tuple[JobKey, ...]
    nodes: tuple[Node, ...]
    gone_nodes: tuple[str, ...]
    hosts: tuple[Host, ...]
    gone_hosts: tuple[str, ...]
    families: tuple[tuple[Any, ...], ...] = ()
    profiled: tuple[Profiled, ...] = ()


class _DecisionDelta(msgspec.Struct, frozen=True):
    actions: tuple[Changes, ...]
    memory: Changes
    reasons: tuple[tuple[JobKey, str], ...]
    gone: tuple[JobKey, ...]


def encode_snapshot(snapshot: ClusterSnapshot, frame: Frame) -> bytes | None:
    """Return a snapshot as its difference; None where it has to be on record as a whole.

    Raise an error of ``record_codec.UNREADABLE`` if a row could not be read again.
    """
    if not frame.usable or not _in_order(snapshot):
        return None
    row = record_codec.snapshot_row(snapshot)
    differing: list[Any] = []
    new: list[Job] = []
    for job, bare in zip(snapshot.jobs, row.jobs, strict=True):
        before = frame.jobs.get(job.key)
        if before is None:
            new.append(bare)
        elif before is not job and (difference := _difference(before, job)) is not None:
            differing.append(difference)
    nodes, gone_nodes = _rows(snapshot.nodes, frame.nodes, attrgetter("name"))
    hosts, gone_hosts = _rows(snapshot.hosts, frame.hosts, attrgetter("name"))
    delta = _SnapshotDelta(
        snapshot.time_s, snapshot.site, tuple(differing), tuple(new), tuple(frame.jobs.keys() - snapshot.by_key.keys()),
        nodes, gone_nodes, hosts, gone_hosts, row.families, row.profiled,
    )  # fmt: skip
    data = record_codec.encode(delta)
    msgspec.json.decode(data, type=_SnapshotDelta)
    return data


def decode_snapshot(data: bytes, frame: Frame) -> ClusterSnapshot:
    """Return the snapshot of :func:`encode_snapshot`."""
    delta = msgspec.json.decode(data, type=_SnapshotDelta)
    jobs = {key: replace(job, profile=None) if job.profile is not None else job for key, job in frame.jobs.items()}
    for key in delta.gone_jobs:
        del jobs[key]
    one: Any
    for one in delta.jobs:
        jobs[one.key] = _with_changes(jobs[one.key], one)
    jobs |= {job.key: job for job in delta.new_jobs}
    return record_codec.snapshot_of(
        SnapshotRow(
            delta.time_s,
            _merged(frame.nodes, delta.nodes, delta.gone_nodes),
            tuple(jobs[key] for key in sorted(jobs)),
            _merged(frame.hosts, delta.hosts, delta.gone_hosts),
            msgspec.convert(delta.families, record_codec.Families),
            delta.profiled,
            delta.site,
        )
    )


def encode_decision(decision: Decision, memory: Memory, frame: Frame) -> bytes:
    """Return a decision as its difference from the round's memory and the key frame's reasons.

    Raise an error of ``record_codec.UNREADABLE`` if it could not be read again.
    """
    reasons = decision.reasons
    changed = tuple(sorted((key, text) for key, text in reasons.items() if frame.reasons.get(key) != text))
    gone = tuple(sorted(frame.reasons.keys() - reasons.keys()))
    rows = tuple(record_codec.action_row(action) for action in decision.actions)
    data = record_codec.encode(_DecisionDelta(rows, memory_changes(decision.memory, memory), changed, gone))
    for action in msgspec.json.decode(data, type=_DecisionDelta).actions:
        record_codec.action_of(action)
    return data


def decode_decision(data: bytes, memory: Memory, frame: Frame) -> Decision:
    """Return the decision of :func:`encode_decision`."""
    row = msgspec.json.decode(data, type=_DecisionDelta)
    gone = frozenset(row.gone)
    reasons = {key: text for key, text in frame.reasons.items() if key not in gone} | dict(row.reasons)
    actions = tuple(record_codec.action_of(action) for action in row.actions)
    return Decision(actions, changed_memory(memory, row.memory), dict(sorted(reasons.items())))


def memory_changes(memory: Memory, base: Memory) -> Changes:
    """Return the fields of a memory that differ from those of another one."""
    if memory is base:
        return {}
    new, old = record_codec.memory_values(memory), record_codec.memory_values(base)
    return {name: value for name, value in new.items() if old[name] != value}


def changed_memory(base: Memory, changes: Changes) -> Memory:
    """Return the memory of :func:`memory_changes`."""
    return record_codec.memory_of_values(record_codec.memory_values(base) | changes) if changes else base


def encode_memory(memory: Memory, base: Memory) -> bytes:
    """Return a memory as its difference from another one."""
    return record_codec.encode(memory_changes(memory, base))


def decode_memory(data: bytes, base: Memory) -> Memory:
    """Return the memory of :func:`encode_memory`."""
    return changed_memory(base, msgspec.json.decode(data, type=Changes))


def _in_order(snapshot: ClusterSnapshot) -> bool:
    """Return True if the order of the rows follows from their names, and each name is there once."""
    keys, names = [job.key for job in snapshot.jobs], [node.name for node in snapshot.nodes]
    hosts = [host.name for host in snapshot.hosts]
    return (
        all(key < other for key, other in pairwise(keys))
        and all(name < other for name, other in pairwise(names))
        and all(name < other for name, other in pairwise(hosts))
    )


def _rows(
    rows: Sequence[T], before: Mapping[str, T], name: Callable[[T], str]
) -> tuple[tuple[T, ...], tuple[str, ...]]:
    changed = tuple(row for row in rows if (old := before.get(name(row))) is not row and old != row)
    return changed, tuple(sorted(before.keys() - set(map(name, rows))))


def _merged(before: Mapping[str, T], rows: Iterable[Any], gone: Iterable[str]) -> tuple[T, ...]:
    found = dict(before)
    for name in gone:
        del found[name]
    found |= {row.name: row for row in rows}
    return tuple(found[name] for name in sorted(found))


def _differing(kind: Any, before: Any, now: Any) -> Changes:
    """Return the fields of ``kind`` that two values have differently."""
    rows = zip(_NAMES_OF[kind], _VALUES[kind](now), _VALUES[kind](before), strict=True)
    return {name: value for name, value, other in rows if value is not other and value != other}


def _difference(before: Job, job: Job) -> Any:
    """Return the changes of a job; None if only its profile has changed, which is written down apart."""
    found = _differing(_Changes, before, job)
    for part, kind in _PARTS.items():
        if part in found and found[part] is not None and (old := getattr(before, part)) is not None:
            found[f"in_{part}"] = kind(**_differing(kind, old, found.pop(part)))
    return _Changes(key=job.key, **found) if found else None


def _with_changes(before: Job, changes: Any) -> Job:
    values = {name: value for name in _NAMES if (value := getattr(changes, name)) is not UNSET}
    for part, kind in _PARTS.items():
        if (inner := getattr(changes, f"in_{part}")) is not UNSET:
            told = {name: value for name in _NAMES_OF[kind] if (value := getattr(inner, name)) is not UNSET}
            values[part] = replace(getattr(before, part), **told)
    return changed(before, **values)
