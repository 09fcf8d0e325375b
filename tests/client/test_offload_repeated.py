"""Twenty yields at random boundaries of two of the benchmark's jobs, and of those of two ranks: not a bit differs.

``benchmarks/gpu/offload.py`` does the same with all jobs and 100 yields.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
from client_peer import PATIENCE_S, Peer, Turns, running, slurm_environment
from test_offload_cycles import jobs, train

pytestmark = pytest.mark.slow

__all__ = ["jobs"]
STEPS, YIELDS = 30, 20
STOPS = sorted(random.Random(4).sample(range(1, STEPS + 1), YIELDS))  # noqa: S311


@pytest.mark.parametrize("name", ["transformer, AdamW, AMP", "2 loader workers"])
def test_many_yields_change_nothing(jobs: object, name: str, request: pytest.FixtureRequest) -> None:
    alone = train(jobs, name, steps=STEPS)
    turns = Turns(request.getfixturevalue("job"), STOPS)
    assert train(jobs, name, turns, steps=STEPS) == alone
    turns.finish()
    assert [message["step"] for message in turns.arrived] == STOPS
    assert all(message["bytes"] > 0 and not message["resident"] for message in turns.yielded)


def test_many_yields_of_two_ranks_change_nothing(peer: Peer, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).with_name("offload_ranks.py")), str(tmp_path), str(STEPS)]
    turns = []
    with running(
        command,
        command,
        envs=[slurm_environment(peer.path, RANK=rank, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2") for rank in "01"],
    ) as ranks:
        for _ in range(3):
            turns.append(Turns(peer, STOPS, ranks=2))
            turns[-1].finish()
        ended = [(rank.communicate(timeout=PATIENCE_S)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ended] == [0, 0], ended
    for rank in range(2):
        results = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(results) == len(turns)
        for alone, shared in results.values():
            assert alone == shared
    buckets, views, shards = ([message["resident"] for message in each.yielded] for each in turns)
    assert all("gradient buckets" in names[0] for names in buckets)
    assert not any(views)
    assert not any(shards)
