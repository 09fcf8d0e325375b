"""A job whose clock has another start than its agent's, as in a container with a time namespace of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from client_peer import PATIENCE_S, Peer, Turns, running, slurm_environment

from cadenza.sidecar import wire

JOB = Path(__file__).with_name("client_job.py")


@pytest.mark.skipif(os.geteuid() != 0, reason="a time namespace needs root")
def test_nothing_compares_the_jobs_clock_with_the_agents(peer: Peer, tmp_path: Path) -> None:
    end = tmp_path / "end"
    taken: list[int] = []
    turns = Turns(peer, [3, 6], while_away=taken.append)
    command = ["unshare", "--time", "--monotonic", "864000", sys.executable, str(JOB), str(end)]
    with running(command, envs=[slurm_environment(peer.path)]) as (job,):
        turns.finish()
        end.touch()
        out, _ = job.communicate(timeout=PATIENCE_S)
    assert job.returncode == 0
    assert (taken, [one["step"] for one in turns.arrived]) == ([1, 2], [3, 6])
    page = turns.pages[0]
    assert page[wire.PAGE_STEP] == int(out) == sum(page[wire.PAGE_FINE :])
    assert page[wire.PAGE_LAST_NS] > 864000 * 10**9
    assert page[wire.PAGE_SUM_NS] < PATIENCE_S * 1e9
    first = page[wire.PAGE_ORDERS : wire.PAGE_ORDERS + wire.ORDER_WORDS].tolist()
    assert first[0] == 1
    assert 0 < first[2] < first[3] < PATIENCE_S * 1e9
