"""Snapshots, decisions and memories as JSON, equal values as equal bytes."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from cadenza.policies.core.actions import Action
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Host, Job, JobKey, Node, SiteRules
from cadenza.policies.core.profile import Profile, linked

K = TypeVar("K")
V = TypeVar("V")

UNREADABLE = (msgspec.MsgspecError, zlib.error, ValueError, TypeError, LookupError, RecursionError)
"""Errors of reading a row whose content is damaged or of another version."""
ACTIONS: dict[str, type[Action]] = {kind.__name__: kind for kind in get_args(Action)}


Pairs = tuple[tuple[K, V], ...]
_HINTS = get_type_hints(Memory)
PAIRS = frozenset(name for name, hint in _HINTS.items() if get_origin(hint) is Mapping and get_args(hint)[0] is not str)
"""Fields of a Memory whose keys are no strings: in JSON's shape they are pairs."""


def _row_type(name: str, names: Iterable[str]) -> Any:
    """Return a struct with fields of a Memory in JSON's shape."""
    hints = {one: Pairs[get_args(_HINTS[one])] if one in PAIRS else _HINTS[one] for one in names}  # type: ignore[misc]
    return msgspec.defstruct(name, list(hints.items()), frozen=True)


_MemoryRow = _row_type("_MemoryRow", _HINTS)
_UndoRow = _row_type("_UndoRow", ("suspended", "placed", "held", "drained", "resumed", "factors"))
"""Our holds, suspends, drains and SiteFactors: ids, restarts, times, nodes, nothing that a user can write."""


class Profiled(msgspec.Struct, frozen=True, array_like=True):
    """A job's profile: the job's index among ``jobs``, the family and the member."""

    job: int
    family: int
    member: int


Families: TypeAlias = tuple[tuple[Profile, ...], ...]
"""Profiles of one model by GPU type, without siblings."""


class SnapshotRow(msgspec.Struct, frozen=True):
    """A snapshot that has each profile once, apart from the jobs: jobs share them, and they refer to each other."""

    time_s: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    hosts: tuple[Host, ...] = ()
    families: Families = ()
    profiled: tuple[Profiled, ...] = ()
    site: SiteRules = SiteRules()


class _DecisionRow(msgspec.Struct, frozen=True):
    actions: tuple[dict[str, Any], ...]
    memory: _MemoryRow  # type: ignore[valid-type] # made above
    reasons: tuple[tuple[JobKey, str], ...]


def encode(value: object) -> bytes:
    """Return a row as JSON."""
    return msgspec.json.encode(value, order="deterministic")


def action_row(action: Action) -> dict[str, Any]:
    """Return an action as a plain object with its class name under ``kind``."""
    fields: dict[str, Any] = msgspec.to_builtins(action)
    return {"kind": type(action).__name__, **fields}


def action_of(row: dict[str, Any]) -> Action:
    """Return the action of :func:`action_row`; raise ``msgspec.ValidationError`` on any other object."""
    kind = ACTIONS.get(row.get("kind", ""))
    if kind is None:
        raise msgspec.ValidationError(f"no action is called {row.get('kind')!r}")
    fields = {name: value for name, value in row.items() if name != "kind"}
    action: Action = msgspec.convert(fields, kind)
    return action


def encode_action(action: Action) -> bytes:
    """Return one action as JSON."""
    return encode(action_row(action))


def decode_action(data: bytes) -> Action:
    """Return the action of :func:`encode_action`."""
    return action_of(msgspec.json.decode(data, type=dict[str, Any]))


def encode_snapshot(snapshot: ClusterSnapshot) -> bytes:
    """Return a snapshot as JSON."""
    return encode(snapshot_row(snapshot))


def snapshot_row(snapshot: ClusterSnapshot) -> SnapshotRow:
    """Return a snapshot in JSON's shape."""
    families: dict[int, list[Profile]] = {}
    """By the identity of a family's first member."""
    places: dict[int, tuple[int, int]] = {}
    profiled = []
    for index, job in enumerate(snapshot.jobs):
        if job.profile is not None:
            if id(job.profile) not in places:
                members = list(job.profile.siblings.values()) or [job.profile]
                places |= {id(member): (len(families), number) for number, member in enumerate(members)}
                families[id(members[0])] = members
            profiled.append(Profiled(index, *places[id(job.profile)]))
    bare = tuple(replace(job, profile=None) if job.profile is not None else job for job in snapshot.jobs)
    written = tuple(tuple(replace(member, siblings={}) for member in family) for family in families.values())
    return SnapshotRow(snapshot.time_s, snapshot.nodes, bare, snapshot.hosts, written, tuple(profiled), snapshot.site)


def decode_snapshot(data: bytes) -> ClusterSnapshot:
    """Return the snapshot of :func:`encode_snapshot`, equal to the one that was encoded."""
    return snapshot_of(msgspec.json.decode(data, type=SnapshotRow))


def snapshot_of(row: SnapshotRow) -> ClusterSnapshot:
    """Return the snapshot of :func:`snapshot_row`."""
    families = [tuple(linked({member.gpu: member for member in family}).values()) for family in row.families]
    jobs = list(row.jobs)
    for one in row.profiled:
        jobs[one.job] = replace(jobs[one.job], profile=families[one.family][one.member])
    return ClusterSnapshot(row.time_s, row.nodes, tuple(jobs), row.hosts, row.site)


def encode_memory(memory: Memory) -> bytes:
    """Return a memory as JSON."""
    return encode(_row_of(_MemoryRow, memory))


def decode_memory(data: bytes) -> Memory:
    """Return the memory of :func:`encode_memory`."""
    return Memory(**_values_of(msgspec.json.decode(data, type=_MemoryRow)))


def memory_values(memory: Memory) -> dict[str, Any]:
    """Return a memory as plain objects, by field."""
    found: dict[str, Any] = msgspec.to_builtins(_row_of(_MemoryRow, memory), order="deterministic")
    return found


def memory_of_values(values: dict[str, Any]) -> Memory:
    """Return the memory of :func:`memory_values`."""
    return Memory(**_values_of(msgspec.convert(values, _MemoryRow)))


def encode_undo(memory: Memory) -> bytes:
    """Return the holds, suspends, drains and SiteFactors of a memory as JSON."""
    return encode(_row_of(_UndoRow, memory))


def decode_undo(data: bytes, rest: Memory) -> Memory:
    """Return ``rest`` with the holds, suspends, drains and SiteFactors of :func:`encode_undo`."""
    return replace(rest, **_values_of(msgspec.json.decode(data, type=_UndoRow)))


def encode_decision(decision: Decision) -> bytes:
    """Return a decision as JSON: equal decisions give equal bytes, which a replay compares."""
    rows = tuple(action_row(action) for action in decision.actions)
    return encode(_DecisionRow(rows, _row_of(_MemoryRow, decision.memory), tuple(sorted(decision.reasons.items()))))


def decode_decision(data: bytes) -> Decision:
    """Return the decision of :func:`encode_decision`."""
    row = msgspec.json.decode(data, type=_DecisionRow)
    memory = Memory(**_values_of(row.memory))
    return Decision(tuple(action_of(action) for action in row.actions), memory, dict(row.reasons))


def pack(data: bytes) -> bytes:
    """Compress JSON for the store; a snapshot shrinks about tenfold."""
    return zlib.compress(data, 6)


def unpack(data: bytes) -> bytes:
    """Return the data that :func:`pack` compressed."""
    return zlib.decompress(data)


def _row_of(kind: Any, memory: Memory) -> Any:
    values = {name: getattr(memory, name) for name in kind.__struct_fields__}
    return kind(**{name: tuple(sorted(one.items())) if name in PAIRS else one for name, one in values.items()})


def _values_of(row: Any) -> dict[str, Any]:
    """Return the fields of a Memory that a row has."""
    return {name: dict(one) if name in PAIRS else one for name, one in msgspec.structs.asdict(row).items()}
