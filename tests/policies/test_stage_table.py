"""Each stage reads only what stages before it wrote, and reads and writes no more than its row in the table says.

The tests of Gandiva's functions watch it too: ``gandiva_rig`` decides with ``stage_watch``.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
from gandiva_rig import decided, on, world
from stage_watch import FIELDS, NAMES, PARTS, decide
from test_golden_decisions import CASES, CHAINS, drawn

from cadenza.policies.sharing import pipeline
from cadenza.policies.sharing.pipeline import STAGES, Pipeline
from cadenza.policies.sharing.state.round_state import RoundState

START = {"memory", "groups", "packed", "fixed", "moves_left", "hosts"}
"""Fields that have a value as the round begins."""
MOST_FIELDS = 10
EVERY = 8
"""Of so many drawn worlds one is watched: the states are copied before each stage."""


def unwritten(stages: tuple[pipeline.Stage, ...]) -> list[str]:
    """Return the stages that read a field which no stage before them writes."""
    written, found = set(START), []
    for stage in stages:
        found += [f"{stage.run.__name__} reads {name}" for name in stage.reads.split() if name not in written]
        written.update(stage.writes.split())
    return found


def without(write: str, of: str) -> tuple[pipeline.Stage, ...]:
    """Return the table in which one stage does not say that it writes a field."""
    return tuple(
        one._replace(writes=" ".join(set(one.writes.split()) - {write})) if one.run.__name__ == of else one
        for one in STAGES
    )


def test_no_stage_reads_what_no_stage_before_it_wrote():
    assert not unwritten(STAGES)
    assert {name for stage in STAGES for name in f"{stage.reads} {stage.writes}".split()} <= FIELDS
    assert unwritten(without("holders", of="take_turns"))


def test_the_state_has_ten_fields_and_a_name_is_that_of_one_field_of_its_parts():
    names = [one.name for one in fields(RoundState)]
    assert len(names) <= MOST_FIELDS
    assert set(PARTS) < set(names)
    assert len({*NAMES, *names}) == len(NAMES) + len(names)


@pytest.mark.parametrize("name", CASES)
def test_stages_read_and_write_what_the_table_says(name, monkeypatch):
    monkeypatch.setattr(Pipeline, "decide", decide)
    for number in range(0, CHAINS, EVERY):
        list(drawn(name, number))


def test_a_row_that_does_not_name_what_its_stage_writes_is_noticed(monkeypatch):
    monkeypatch.setattr(pipeline, "STAGES", without("holders", of="take_turns"))
    with pytest.raises(AssertionError, match=r"take_turns writes .*holders"):
        decided(world(on(1, "a", 0)))


def test_a_stage_that_says_something_without_its_row_saying_so_is_noticed(monkeypatch):
    monkeypatch.setattr(pipeline, "STAGES", without("reasons", of="take_turns"))
    with pytest.raises(AssertionError, match=r"take_turns writes .*reasons"):
        decided(world(on(1, "a", 0), on(2, "a", 0, state="waiting", lane=1)))
