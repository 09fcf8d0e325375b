"""Preemption on real Slurm: more jobs than GPUs, a long job gives its GPUs up, comes back, and loses nothing."""

from __future__ import annotations

from cluster import wait_for
from harness import FOUR_GPUS, HELD, Cluster

ITERATIONS = 400
SETTINGS = HELD + (
    "[sharing]\nmax_priority = 5\nshare_between_users = false\n"
    '[policy]\norder = "levels"\nshare = "preemption"\n'
)  # fmt: skip


def test_a_long_job_gives_its_gpus_up_and_comes_back(cluster: Cluster, kept: str) -> None:
    training = f"--model transformer --iterations {ITERATIONS}"
    alone = cluster.train("preemption-alone", training, options=("--partition=plain", "--gres=gpu:1"))
    cluster.wait_done(alone)
    cluster.configure(SETTINGS)
    # 1. Two jobs have all GPUs; the one that came last keeps checkpoints.
    first = cluster.paced("preemption-first", iterations=2500)
    cluster.wait_state(first, "RUNNING")
    long = cluster.train(
        "preemption-long", f"{training} --iteration-s 0.05 --checkpoint-dir {kept}/preemption", options=FOUR_GPUS
    )
    wait_for("a job that saves checkpoints", lambda: cluster.lease(long).get("checkpoints"), 60)
    # 2. A better-ranked job of another user comes: the long one is saved and requeued, and waits in the hold.
    better = cluster.paced(
        "preemption-better", iterations=300, user="bob", options=("--gres=gpu:4", "--cadenza=priority=5")
    )
    cluster.wait_state(better, "RUNNING")
    cluster.wait_state(long, "PENDING")  # its old incarnation may still be completing
    given_up = cluster.job(long)
    assert (given_up["Restarts"], given_up["Priority"]) == ("1", "0")
    wait_for("a round that sees it", lambda: "stays queued" in cluster.why(long)["summary"])
    assert cluster.state(first) == "RUNNING"
    # 3. It comes back by its rank once GPUs are free, on whichever host, and ends as if it had run alone.
    cluster.wait_done(better)
    cluster.wait_state(long, "RUNNING", "COMPLETED")
    cluster.wait_done(long)
    found = cluster.result("preemption-long")
    assert found["restart"] == 1
    assert found["losses_sha256"] == cluster.result("preemption-alone")["losses_sha256"]
