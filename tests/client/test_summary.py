"""The line at a job's end for --cadenza=summary: what turns and moves took, and a limit that Slurm can plan with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from client_peer import Peer, Script, slurm_environment

from cadenza.sidecar.client.session.arrival import Arrival
from cadenza.sidecar.client.session.identity import Identity
from cadenza.sidecar.client.session.summary import Summary

LIMITS = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "87400"}


def summary(restart: int = 0, back_s: float | None = None) -> Summary:
    arrival = Arrival(lambda *_, **__: True, lambda: None)
    arrival.back_s = back_s
    found = Summary(arrival)
    found.begin(Identity(12, restart, 0, 1, None, "n1", 1, ()), {})
    return found


def test_waits_and_moves_are_told_with_what_they_took() -> None:
    found = summary(restart=2, back_s=194.0)
    found.waits, found.away_ns = 4, 720 * 10**9
    assert found.text(7200.0, LIMITS) == (
        "job 12 ends after 2 h 0 min; 4 waits for turns took 12 min, 10% of it; started again 2 times, the last time "
        "3 min after its checkpoint; more: cadenza why 12"
    )
    assert summary(restart=1).text(60.0, {}) == "job 12 ends after 60 s; started again 1 time; more: cadenza why 12"


@pytest.mark.parametrize(
    ("run_s", "restart", "environ", "advice"),
    [
        (7000.0, 0, LIMITS, "; starts earlier next time with #SBATCH --time=3:00:00"),
        (600.0, 0, LIMITS, "; starts earlier next time with #SBATCH --time=0:20:00"),
        (500.0, 0, LIMITS, ""),
        (30_000.0, 0, LIMITS, ""),
        (7000.0, 1, LIMITS, ""),
        (7000.0, 0, {}, ""),
        (7000.0, 0, {**LIMITS, "SLURM_JOB_END_TIME": "soon"}, ""),
    ],
)
def test_a_limit_far_above_the_run_time_is_named(
    run_s: float, restart: int, environ: dict[str, str], advice: str
) -> None:
    text = summary(restart).text(run_s, environ)
    assert text.endswith(f"{advice}; more: cadenza why 12")
    assert ("#SBATCH" in text) == bool(advice)
    assert ("never waited or moved for others" in text) == (restart == 0)


JOB = """
import os, sys
from cadenza.sidecar import client
session = client.attach()
assert session.active
for _ in range(3):
    session.boundary()
if "fork" in sys.argv and os.fork() == 0:
    sys.exit(0)
if "fork" in sys.argv:
    os.wait()
"""


def run(peer: Peer, environ: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **slurm_environment(peer.path), **environ}
    command = [sys.executable, "-c", JOB, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("environ", "words", "lines"),
    [({"CADENZA_SUMMARY": "1"}, [], 1), ({"CADENZA_SUMMARY": "1"}, ["fork"], 1), ({}, [], 0),
     ({"CADENZA_SUMMARY": "1", "RANK": "1", "WORLD_SIZE": "2"}, [], 0)],
    ids=["asked for", "a child's end is not the job's", "not asked for", "another rank"],
)  # fmt: skip
def test_the_first_rank_writes_one_line_where_the_job_wants_it(
    peer: Peer, environ: dict[str, str], words: list[str], lines: int
) -> None:
    agent = Script(peer.rank, peer)
    done = run(peer, environ, *words)
    agent.finish()
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stderr.splitlines() if " ends after " in line]
    assert len(found) == lines
    assert all(line.startswith("cadenza: job ") and "never waited or moved" in line for line in found)


def test_a_turn_of_another_job_is_a_wait(peer: Peer) -> None:
    def agent() -> None:
        rank = peer.rank(stop=2)
        rank.hear("arrived")
        rank.say("commit", order=1)
        rank.hear("yielded")
        rank.clear()
        rank.say("resume", order=2)
        rank.hear("resumed")

    script = Script(agent, peer)
    done = run(peer, {"CADENZA_SUMMARY": "1"})
    script.finish()
    assert "; 1 wait for turns took 0 s, " in done.stderr
