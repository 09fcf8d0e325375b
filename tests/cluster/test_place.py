"""Synergy's rounds on real Slurm without a hold: a job that they stop comes back behind others, by its SiteFactor."""

from __future__ import annotations

from cluster import wait_for
from harness import FOUR_GPUS, Cluster

SETTINGS = '[policy]\norder = "las"\nshare = "none"\nallocate = "proportional"\nplace = true\n'


def test_a_round_stops_a_job_by_a_factor_and_lifts_it_when_its_turn_comes(cluster: Cluster, kept: str) -> None:
    cluster.configure(SETTINGS)

    def started(number: int) -> int:
        # Longer than the test on any machine: one that ended would make room by itself, and nobody would be stopped.
        job = cluster.paced("old", f"--checkpoint {kept}/{number}", iterations=100_000, options=FOUR_GPUS)
        wait_for(f"checkpoints of job {job}", lambda: cluster.lease(job).get("checkpoints"))
        return job

    # Its move by hand makes known what a move costs: a job keeps its GPUs for ten times as long, or else for 600 s.
    first = started(0)
    there = "node2" if cluster.job(first)["NodeList"] == "node1" else "node1"
    cluster.cadenza("move", str(first), "--to", there)
    wait_for("its move", lambda: cluster.job(first)["NodeList"] == there, 90)
    wait_for("its checkpoints", lambda: cluster.lease(first).get("checkpoints"), 60)
    old = [first, started(1)]
    new = cluster.paced("new", f"--checkpoint {kept}/new", iterations=200, options=FOUR_GPUS)
    # 1. The job that has had less goes first; the other is in Slurm's queue, far below, and nobody holds it.
    cluster.wait_state(new, "RUNNING", timeout=200)
    (stopped,) = wait_for("one that stopped", lambda: [job for job in old if cluster.state(job) == "PENDING"])
    words = ("sprio", "-h", "-j", str(stopped), "-o", "%S")
    wait_for("its factor", lambda: cluster.ctl(*words, check=False).strip().startswith("-10"), 20)
    assert cluster.job(stopped)["Priority"] == "1"
    # 2. Its turn comes: nothing of ours is left on it.
    cluster.wait_done(new)
    cluster.wait_state(stopped, "RUNNING")
    query = "select json_extract(action, '$.factor') from actions where kind = 'SetFactor' and ok"
    wait_for("its factor to be taken back", lambda: [0] in cluster.sql(f"{query} and job = {stopped}"))
