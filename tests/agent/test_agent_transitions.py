"""The tables of states: every state can be reached and left, and the coordinator uses exactly their events."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cadenza.sidecar.agent.driver import machine
from cadenza.sidecar.agent.errors import LeaseConflictError
from cadenza.sidecar.agent.jobs import stop_states
from cadenza.sidecar.agent.jobs.stop_states import AwayStop, CheckpointStop, UnleasedStop, YieldStop
from cadenza.sidecar.agent.leases import lease_table
from cadenza.sidecar.agent.turns import away_saves, coordinator, resumes, stop_ends

PARTS = (coordinator, stop_ends, resumes, away_saves)
TABLES = {
    "lease": (lease_table.TRANSITIONS, "waiting", set()),
    "stop": (stop_states.TRANSITIONS, "running", {"yielded", "lost"}),
    "process": (machine.TRANSITIONS, "running", set()),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reached_and_left(name: str) -> None:
    table, start, ends = TABLES[name]
    reached = {start}
    for _ in table:
        reached |= {after for state, _, after in table if state in reached}
    assert reached == {state for row in table for state in (row[0], row[2])}
    assert reached - {state for state, _, _ in table} == ends
    assert len({(state, event) for state, event, _ in table}) == len(table), "one next state for each event"


def test_the_coordinator_uses_exactly_the_events_of_the_table() -> None:
    text = "".join(Path(module.__file__).read_text() for module in (*PARTS, stop_states))
    body = text.replace(text[text.index("TRANSITIONS:") : text.index('"""State, event')], "")
    quoted = set(re.findall(r'"([a-z ]+)"', body))
    events = {event for _, event, _ in stop_states.TRANSITIONS}
    assert events <= quoted, "an event that no code raises"
    moved = set(re.findall(r'\.move\("([a-z ]+)"\)', body))
    assert moved <= events


@pytest.mark.parametrize(
    ("kind", "after"), [(YieldStop, "offloading"), (UnleasedStop, "offloading"), (CheckpointStop, "saving")]
)
def test_each_kind_of_stop_goes_its_way_once_all_have_arrived(kind: type[stop_states.Stop], after: str) -> None:
    stop = kind(1, "service", 10.0, 60.0)
    assert (stop.state, stop.committed) == ("aligning", False)
    stop.on_all_arrived(12.5)
    assert (stop.state, stop.committed, stop.boundary_s) == (after, True, 2.5)
    with pytest.raises(LeaseConflictError, match="'withdraw' does not follow"):
        stop.move("withdraw")


def test_a_checkpoint_has_a_limit_for_saving_and_one_for_the_requeue() -> None:
    stop = CheckpointStop(1, "service", 0.0, 60.0, save_s=5.0, hold_s=7.0)
    assert stop.on_timeout(100.0) is None, "its boundary has a limit of its own"
    stop.on_all_arrived(1.0)
    assert stop.on_timeout(6.0) is None
    assert stop.on_timeout(6.1) == ("fail", "its checkpoint was not complete after 5 s")
    stop.move("all saved")
    stop.saved_at = 6.0
    assert stop.on_timeout(13.0) is None
    assert stop.on_timeout(13.1) == ("go on", "not requeued within 7 s of its checkpoint")


def test_a_checkpoint_from_host_memory_needs_no_boundary_and_ends_where_it_began() -> None:
    stop = AwayStop(1, "service", 10.0, 0.0, save_s=5.0, hold_s=7.0)
    assert (stop.state, stop.committed, stop.on_timeout(15.0)) == ("saving away", True, None)
    assert stop.on_timeout(15.1) == ("fail", "its checkpoint was not complete after 5 s")
    stop.move("fail")
    assert stop.state == "yielded"
