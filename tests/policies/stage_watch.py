"""Decisions whose stages are watched: each reads and writes the fields of the state that its row in the table names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.sharing import pipeline
from cadenza.policies.sharing.pipeline import Pipeline
from cadenza.policies.sharing.state.sharing_state import SharingState

FIELDS = frozenset(one.name for one in fields(SharingState) if not one.name.startswith("_")) | {"hosts"}
Found = dict[str, set[str]]


class Watched(SharingState):
    """A state that notes which of its fields the stage that runs reads and sets."""

    __slots__ = ()
    reads: ClassVar[set[str]] = set()
    writes: ClassVar[set[str]] = set()

    def __getattribute__(self, name: str) -> Any:
        Watched.reads.add(name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: object) -> None:
        Watched.writes.add(name)
        super().__setattr__(name, value)


def content(state: SharingState) -> dict[str, object]:
    """Return a copy of the values that a stage could change in place."""
    values = {name: getattr(state, name) for name in FIELDS}
    found = {name: type(value)(value) for name, value in values.items() if type(value) in (list, dict, set)}
    found["hosts"] = [
        (repr(one.use), [*one.residents], one.unmanaged, one.committed_mb) for one in state.hosts.values()
    ]
    return found


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Return the fields that each stage reads and those that it writes, by the stage's name."""
    return {stage.run.__name__: (set(stage.reads.split()), set(stage.writes.split())) for stage in pipeline.STAGES}


def decide(self: Pipeline, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
    """Decide as ``Pipeline.decide`` does; an AssertionError names the stage that does what its row does not say."""
    rows = table()
    changed = set().union(*(writes for _, writes in rows.values()))
    state = Watched.of(snapshot, memory, self.settings, self.gandiva, self.order, self.allocate)
    for stage in (*self.stages, lambda state: dict(state.reasons)):  # sentences are worked out when they are read
        before = content(state)
        Watched.reads, Watched.writes = set(), set()
        stage(state)
        reads, writes = Watched.reads & changed, Watched.writes & FIELDS
        after = content(state)
        writes |= {name for name in after if after[name] != before.get(name, after[name])}
        may_read, may_write = rows.get(stage.__name__, rows["explain"])
        assert writes <= may_write, f"{stage.__name__} writes {writes - may_write}, of which its row says nothing"
        undeclared = reads - may_read - may_write
        assert not undeclared, f"{stage.__name__} reads {undeclared}, of which its row says nothing"
    return state.decision()
