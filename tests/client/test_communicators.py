"""Communicators are suspended by all ranks or none, after the commit and before memory is released, and come back."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from client_peer import PATIENCE_S, Peer, Script, running, slurm_environment

pytestmark = pytest.mark.slow

TURN = [
    "on_yield",
    "suspend group 0, state here", "suspend group 1, state here",
    "resume group 0, state here", "resume group 1, state here",
    "on_resume, state here",
]  # fmt: skip


def seen(peer: Peer, tmp_path: Path, fault: str, agent: Callable[[], object]) -> list[list[str]]:
    """Run two ranks under a script of the agent; return what each has written down."""
    command = [sys.executable, str(Path(__file__).with_name("suspending_ranks.py")), str(tmp_path), fault]
    envs = [slurm_environment(peer.path, RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") for rank in "01"]
    with running(command, command, envs=envs) as ranks:
        agent()
        ended = [(rank.communicate(timeout=PATIENCE_S)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0], ended
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("fault", ["none", "room"])
def test_all_ranks_suspend_at_each_turn_and_resume_with_their_state(peer: Peer, tmp_path: Path, fault: str) -> None:
    """Rank 0 says that it has its state back before it waits for rank 1, whose GPU may still be full."""

    def agent() -> None:
        ranks = sorted((peer.rank(stop=2) for _ in range(2)), key=lambda one: one.hello["rank"])
        for order, then in ((1, 4), (2, 0)):
            for rank in ranks:
                rank.hear("arrived")
            for rank in ranks:
                rank.say("commit", order=order)
            for rank in ranks:
                rank.hear("yielded")
                rank.stop_at(then, order + 1) if then else rank.clear()
            for rank in ranks:
                rank.say("resume", order=order)
                rank.hear("resumed")

    assert seen(peer, tmp_path, fault, Script(agent, peer).finish) == [TURN * 2] * 2


@pytest.mark.parametrize("fault", ["on_yield", "move"])
def test_a_rank_that_cannot_yield_leaves_no_other_alone(peer: Peer, tmp_path: Path, fault: str) -> None:
    def agent() -> None:
        ranks = sorted((peer.rank(stop=2) for _ in range(2)), key=lambda one: one.hello["rank"])
        for rank in ranks:
            rank.hear("arrived")
        for rank in ranks:
            rank.say("commit", order=1)
        assert ranks[1].hear("yielded")["error"]
        assert "error" not in ranks[0].hear("yielded")
        for rank in ranks:
            rank.clear()
        ranks[0].say("resume", order=1)
        ranks[0].hear("resumed")

    first, second = seen(peer, tmp_path, fault, Script(agent, peer).finish)
    if fault == "move":
        assert first == TURN
        assert second == ["on_yield", *TURN[1:3], "move fails", TURN[5], *TURN[3:5]]
    else:
        assert (first, second) == ([TURN[0], TURN[5]], ["on_yield fails"])
