"""Decisions whose stages are watched: each reads and writes the fields of the state that its row in the table names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot
from cadenza.policies.sharing import pipeline
from cadenza.policies.sharing.board.board import Board
from cadenza.policies.sharing.pipeline import Pipeline
from cadenza.policies.sharing.state.outcome import Outcome
from cadenza.policies.sharing.state.round_state import RoundJobs, RoundState, Sizes, Turns, WaitingJobs

PARTS = {"jobs": RoundJobs, "who": Turns, "where": Board, "how_big": Sizes, "slurm": WaitingJobs, "outcome": Outcome}
NAMES = [one.name for part in PARTS.values() for one in fields(part)]
FIELDS = frozenset(NAMES) | {"hosts", "memory"}
Found = dict[str, set[str]]


class Watch:
    """The fields of the state and of its parts that the stage which runs has read and set."""

    reads: ClassVar[set[str]] = set()
    writes: ClassVar[set[str]] = set()

    def read(self, name: str) -> Any:
        """Note a field that is read."""
        Watch.reads.add(name)
        return object.__getattribute__(self, name)

    def write(self, name: str, value: object) -> None:
        """Note a field that is set."""
        Watch.writes.add(name)
        object.__setattr__(self, name, value)


HOOKS = {"__getattribute__": Watch.read, "__setattr__": Watch.write}
WATCHED = {one: type(one.__name__, (one,), HOOKS) for one in (*PARTS.values(), RoundState)}


def content(state: RoundState) -> dict[str, object]:
    """Return a copy of the values that a stage could change in place."""
    values = {one.name: getattr(part, one.name) for name in PARTS for part in [getattr(state, name)]
              for one in fields(PARTS[name])}  # fmt: skip
    found = {name: type(value)(value) for name, value in values.items() if type(value) in (list, dict, set)}
    found["reasons"] = {key: dict(said) for key, said in state.outcome.reasons.items()}
    found["hosts"] = [
        (repr(one.use), [*one.residents], one.unmanaged, one.committed_mb) for one in state.where.hosts.values()
    ]
    return found


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Return the fields that each stage reads and those that it writes, by the stage's name."""
    return {stage.run.__name__: (set(stage.reads.split()), set(stage.writes.split())) for stage in pipeline.STAGES}


def decide(self: Pipeline, snapshot: ClusterSnapshot, memory: Memory) -> Decision:
    """Decide as ``Pipeline.decide`` does; an AssertionError names the stage that does what its row does not say."""
    rows = table()
    changed = set().union(*(writes for _, writes in rows.values()))
    state = RoundState.of(snapshot, memory, self.settings, self.gandiva, self.order, self.allocate)
    for part in (*(getattr(state, name) for name in PARTS), state):
        part.__class__ = WATCHED[type(part)]
    for stage in (*self.stages, lambda state: dict(state.outcome.sentences)):  # these are worked out when they are read
        before = content(state)
        Watch.reads, Watch.writes = set(), set()
        stage(state)
        reads, writes = Watch.reads & changed, Watch.writes & FIELDS
        after = content(state)
        writes |= {name for name in after if after[name] != before.get(name, after[name])}
        may_read, may_write = rows.get(stage.__name__, rows["explain"])
        assert writes <= may_write, f"{stage.__name__} writes {writes - may_write}, of which its row says nothing"
        undeclared = reads - may_read - may_write
        assert not undeclared, f"{stage.__name__} reads {undeclared}, of which its row says nothing"
    return state.outcome.decision(state.memory)
