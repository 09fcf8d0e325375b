"""Communicators are suspended by all ranks or none, after the commit and before memory is released, and come back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from client_peer import PATIENCE_S, Peer, Script, running, slurm_environment

pytestmark = pytest.mark.slow

HOST = 1000
"""Difference of the numbers that the agents of two hosts give their orders."""
TURN = [
    "on_yield",
    "suspend group 0, state here", "suspend group 1, state here",
    "resume group 0, state here", "resume group 1, state here",
    "on_resume, state here",
]  # fmt: skip

FAULTS = (("", 4), ("room", 6), ("move", 8), ("on_yield", 10), ("suspend", 0))
"""The fault of each stop, and the step of the next."""


def test_all_ranks_suspend_and_resume_together_or_not_at_all(peer: Peer, tmp_path: Path) -> None:
    """Rank 0 says that it has its state back before it waits for rank 1, whose GPU may still be full."""

    def agent() -> None:
        ranks = sorted((peer.rank(stop=2) for _ in range(2)), key=lambda one: one.hello["rank"])
        for order, (fault, then) in enumerate(FAULTS, 1):
            failing = fault in ("move", "on_yield")
            for rank in ranks:
                assert rank.hear("arrived")["step"] == 2 * order
            for host, rank in enumerate(ranks):
                rank.say("commit", order=order + (order > 1) * host * HOST)
            yielded = [rank.hear("yielded") for rank in ranks]
            assert ["error" in one for one in yielded] == [False, failing]
            freed = [0 if fault == "on_yield" else 2 * 3 << 20, 0 if failing else 2 * 3 << 20]
            assert [one.get("regrown_bytes", [0]) for one in yielded] == [[size] for size in freed]
            for rank in ranks:
                rank.stop_at(then, order + 1 + ranks.index(rank) * HOST) if then else rank.clear()
            for rank in ranks[:1] if failing else ranks:
                rank.say("resume", order=order)
                rank.hear("resumed")
        # The second session of both: the first of them is stopped at a step that its first session had, too.
        for rank in ranks:
            rank.hear("detach")
        first, _ = sorted((peer.rank() for _ in range(2)), key=lambda one: one.hello["rank"])
        first.stop_at(2, 1)
        assert first.hear("arrived")["step"] == 2
        first.say("commit", order=1)
        assert "regrown_bytes" not in first.hear("yielded")
        first.clear()
        first.say("resume", order=1)
        first.hear("resumed")

    command = [sys.executable, str(Path(__file__).with_name("suspending_ranks.py")), str(tmp_path)]
    envs = [slurm_environment(peer.path, RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") for rank in "01"]
    with running(command, command, envs=envs) as ranks:
        Script(agent, peer).finish()
        ended = [(rank.communicate(timeout=PATIENCE_S)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0], ended
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == {"2": TURN, "4": TURN, "6": TURN, "8": [TURN[0], TURN[5]], "10": TURN, "102": [TURN[0], TURN[5]]}
    assert second == {
        "2": TURN,
        "4": [*TURN[:3], "room fails", *TURN[3:]],
        "6": [*TURN[:3], "move fails", *TURN[3:]],
        "8": ["on_yield fails"],
        "10": [*TURN[:2], "suspend fails", *TURN[2:]],
    }
