"""The state diagrams of the site show every state and event of the machines' own tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args
from xml.etree import ElementTree as ET

import pytest

from cadenza.policies.core.move import Phase
from cadenza.sidecar.agent.driver import machine
from cadenza.sidecar.agent.jobs import stop_states
from cadenza.sidecar.agent.leases import lease_table

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs"))
import move_table
from state_diagram import draw

TABLES = {
    "lease": lease_table.TRANSITIONS,
    "stop": stop_states.TRANSITIONS,
    "driver": machine.TRANSITIONS,
    "move": tuple(dict.fromkeys(move_table.rows())),
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
def test_each_state_and_event_is_drawn_within_the_frame(table):
    drawing = ET.fromstring(draw(table, "a <title>"))  # noqa: S314 (our own text)
    texts = [element.text for element in drawing.iter(f"{SVG}text")]
    changes = [row for row in table if row[0] != row[2]]
    states = {state for row in changes for state in (row[0], row[2])}
    assert sorted(texts) == sorted([*states, *(event for _, event, _ in changes), "a <title>"])
    width, height = float(drawing.get("width")), float(drawing.get("height"))
    assert all(0 <= float(element.get("x")) <= width for element in drawing.iter(f"{SVG}text"))
    assert all(0 <= float(element.get("y")) <= height for element in drawing.iter(f"{SVG}text"))


def test_the_order_of_states_can_be_given():
    drawing = ET.fromstring(draw([("a", "x", "b"), ("a", "y", "c")], "t", ("a", "c", "gone")))  # noqa: S314 (our own text)
    boxes = [element.text for element in drawing.iter(f"{SVG}text") if element.get("font-size") == "14"]
    assert boxes == ["a", "c", "b"]


def test_every_phase_of_a_move_is_reached_and_can_end():
    changes = [row for row in TABLES["move"] if row[0] != row[2]]
    phases = {kind.__name__.lower() for kind in get_args(Phase)}
    assert {end for _, _, end in changes} == phases
    assert {start for start, _, end in changes if end == "over"} == phases - {"over"}
