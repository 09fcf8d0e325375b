"""Jobs in transit are polled between rounds, and their next step in Slurm starts a round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from service_rig import FileSlurm, books, job

from cadenza.policies.core.model import JobKey, Share
from cadenza.policies.core.move import Leaving, Move, Ordered, Over, Phase, Placed, Prefetching, Requeued, Wanted
from cadenza.slurm_plugin.service.loop import (
    MAX_TRANSIT_POLL_S,
    NAP_S,
    TRANSIT_POLL_S,
    has_moved_on,
    jobs_in_transit,
    needs_prompt_round,
    transit_nap_s,
)

SHARES = (Share("n2", 1, 1, 1000),)
PHASES: tuple[Phase, ...] = (
    Wanted(100.0), Prefetching(100.0), Ordered(100.0), Requeued(100.0, 90.0), Placed(100.0, 90.0), Leaving(100.0),
    Over(100.0, "went to n2"),
)  # fmt: skip


def move(phase: Phase, number: int = 1) -> Move:
    return Move(JobKey(number, 0), SHARES, "r", phase)


def test_only_jobs_that_leave_their_nodes_are_looked_at_and_not_for_ever() -> None:
    moves = [move(phase, number) for number, phase in enumerate(PHASES)]
    assert jobs_in_transit(moves, 101.0) == {3: 100.0}
    assert jobs_in_transit(moves, 100.0 + MAX_TRANSIT_POLL_S) == {}
    assert [type(phase) for phase in PHASES if needs_prompt_round([move(phase)])] == [Prefetching, Ordered, Requeued]


def test_jobs_that_take_long_are_looked_at_less_often() -> None:
    """A site's job may have KillWait (30 s) to stop: 20 looks a second would be 600 requests, now it is some 70."""
    assert [transit_nap_s((100.0,), 100.0 + passed_s) for passed_s in (-5.0, 0.1, 1.0, 30.0)] == [
        TRANSIT_POLL_S,
        TRANSIT_POLL_S,
        pytest.approx(0.2),
        NAP_S,
    ]
    assert transit_nap_s((90.0, 100.0), 100.0) == TRANSIT_POLL_S
    assert transit_nap_s((), 100.0) == NAP_S


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"state": "OTHER"}, True),
        ({"key": JobKey(1, 1)}, True),
        ({"state": "PENDING"}, True),
        ({"eligible_s": 4e9}, True),
    ],
    ids=["as it was", "completing", "requeued", "pending", "not eligible yet"],
)
def test_a_round_is_due_when_slurm_is_further(tmp_path: Path, changes: dict[str, object], expected: bool) -> None:
    slurm, seen = FileSlurm(tmp_path / "books.json"), books(job(1), job(2))
    slurm.write(replace(seen, jobs=(replace(seen.jobs[0], **changes), replace(seen.jobs[1], state="OTHER"))))  # type: ignore[arg-type]
    assert has_moved_on(slurm, 1, seen) is expected


def test_a_slurm_that_does_not_answer_starts_no_round(tmp_path: Path) -> None:
    slurm = FileSlurm(tmp_path / "books.json")
    slurm.write(books(job(1)))
    slurm.down.touch()
    assert not has_moved_on(slurm, 1, books(job(1, state="OTHER")))
