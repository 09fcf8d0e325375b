"""Jobs that keep checkpoints leave the hosts that an admin empties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from snapshots import NOW, cluster, job, key, lease, moving, node

from cadenza.policies.composition import PolicySettings, build
from cadenza.policies.core.actions import MakeWay, Migrate
from cadenza.policies.core.decision import Memory
from cadenza.policies.core.move import Ordered
from cadenza.policies.ledger import remember
from cadenza.policies.sharing.state.settings import SharingSettings

RULES = PolicySettings(
    frozenset({"gpu"}), sharing=SharingSettings(enforce=True, floor=True, min_run_s=0.0), phased_moves=True
)
SAVES = job(1, lease=lease("held", 0, held_s=9.0, checkpoints=True), run_s=800.0, time_limit_s=3600.0)
EMPTIED = node(drained=True, drain_reason="cadenza host: fan", empty_from_s=0.0)


def leaves(one, where, share: str = "preemption") -> bool:
    """Whether a job is told to leave without being told where to."""
    actions = build("fifo", "none", share, RULES).decide(cluster(one, nodes=(where,)), Memory()).actions
    return any(isinstance(action, Migrate) and not action.shares for action in actions)


@pytest.mark.parametrize("share", ["preemption", "timeslice", "gandiva", "none"])
def test_a_job_that_keeps_checkpoints_leaves_an_emptied_host(share: str) -> None:
    assert leaves(SAVES, EMPTIED, share)
    assert not leaves(SAVES, node(drained=True, drain_reason="fan"), share)


@pytest.mark.parametrize(
    "stays",
    [
        replace(SAVES, lease=replace(SAVES.lease, checkpoints=False)),
        replace(SAVES, lease=replace(SAVES.lease, ready=False)),
        replace(SAVES, requeueable=False),
        replace(SAVES, options=None),
    ],
)
def test_a_job_that_cannot_save_stays_there(stays) -> None:
    assert not leaves(stays, EMPTIED)


def test_before_a_reservation_jobs_leave_that_would_run_into_it() -> None:
    assert not leaves(SAVES, node(empty_from_s=NOW + 700))
    assert leaves(SAVES, node(empty_from_s=NOW + 500))
    assert not leaves(replace(SAVES, time_limit_s=1000.0), node(empty_from_s=NOW + 500))


def test_it_saves_and_is_requeued_as_it_is() -> None:
    decide, rules = moving(build("fifo", "none", "preemption", replace(RULES, phased_moves=False)).decide), Memory()
    before = cluster(SAVES, nodes=(EMPTIED,))
    first = decide(before, rules)
    memory = remember(first.memory, first.actions, before)
    assert isinstance(memory.moves[0].phase, Ordered)
    saved = replace(SAVES, lease=replace(SAVES.lease, state="stopping", saved=True))
    then = decide(cluster(saved, nodes=(EMPTIED,)), memory)
    assert [(one.jobs, one.factors) for one in then.actions if isinstance(one, MakeWay)] == [((key(1),), (0,))]
