"""A moved job on real Slurm: its output says when it goes and comes back, and one that trains without is left alone."""

from __future__ import annotations

import re

from test_faults import kill

from cluster import PYTHON, SHARED, wait_for
from harness import Cluster

ITERATIONS = 150
FORGETFUL = f"{SHARED}/forgetful.py"
SCRIPT = """
import sys, time, torch
from cadenza.sidecar import client

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
client.attach(model, optimizer)
keeper = client.checkpoint(sys.argv[1], model=model, optimizer=optimizer)
for step in range(100_000):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    keeper.at(step + 1)
    client.boundary()
    time.sleep(0.05)
"""


def train(cluster: Cluster, name: str, *arguments: str, options: tuple[str, ...]) -> int:
    return cluster.train(name, f"--model mlp --iterations {ITERATIONS}", *arguments, options=("--gres=gpu:1", *options))


def lines(cluster: Cluster, job: int) -> list[str]:
    """Return what the client has said on a job's output."""
    return [line for line in cluster.log(job).splitlines() if line.startswith("cadenza: ")]


def test_a_move_is_told_on_the_jobs_output_and_a_script_that_forgets_to_restore_is_moved_once(
    cluster: Cluster, kept: str
) -> None:
    cluster.put(FORGETFUL, SCRIPT)
    keeps = train(cluster, "receipt-keeps", f"--iteration-s 0.1 --checkpoint-dir {kept}/keeps", options=("--cadenza",))
    forgets = cluster.sbatch(
        "--mem=1000", "--gres=gpu:1", "--cadenza", command=f"exec {PYTHON} {FORGETFUL} {kept}/forgets"
    )
    jobs = (keeps, forgets)
    alone = train(cluster, "receipt-alone", options=("--partition=plain",))
    # 1. Both are moved; Slurm brings both back.
    for job in jobs:
        wait_for(f"checkpoints of job {job}", lambda job=job: cluster.lease(job).get("checkpoints"))
    goal = {job: "node1" if cluster.job(job)["NodeList"].startswith("node2") else "node2" for job in jobs}
    for job in jobs:
        cluster.cadenza("move", str(job), "--to", goal[job])
    for job in jobs:
        wait_for(f"job {job} moved", lambda job=job: cluster.job(job)["NodeList"] == goal[job], 60)
    # 2. The one that restores says so, with the time that it was away, and ends as if it had never left.
    wait_for("its two lines", lambda: len(lines(cluster, keeps)) == 2)
    gone, back = lines(cluster, keeps)
    assert (
        found := re.fullmatch(
            rf"cadenza: moves to {goal[keeps]} as asked for by hand; checkpoint of step (\d+) saved in \d+\.\d s; "
            rf"comes back by itself \(`cadenza why {keeps}`\)",
            gone,
        )
    ), gone
    assert re.fullmatch(rf"cadenza: continues at step {found[1]} after \d+ s", back), back
    # 3. The one that forgets is reported: on its output, by `why`, and to its user who asks for another move.
    told = wait_for("its report", lambda: cluster.lease(forgets).get("unrestored"))
    assert "it trains without having restored the checkpoint of step" in told
    assert f"{kept}/forgets/step-" in told
    assert "it is not moved again" in cluster.log(forgets)
    kill(cluster, "ctl", "cadenzad")
    wait_for("a round since", lambda: not cluster.lease(forgets).get("checkpoints", True))
    refused = cluster.cadenza("move", str(forgets), "--to", "node1", check=False)
    assert refused.returncode
    assert f"job {forgets} cannot be moved: {told}, so it is not moved again" in refused.stderr
    assert cluster.job(forgets)["Restarts"] == "1"
    cluster.wait_done(alone, keeps)
    assert cluster.result("receipt-keeps")["losses_sha256"] == cluster.result("receipt-alone")["losses_sha256"]
    # 4. A later start of it, by whomever, is not moved either.
    cluster.requeue(forgets)
    wait_for("its third start", lambda: cluster.lease(forgets).get("ready") and cluster.state(forgets) == "RUNNING")
    assert cluster.job(forgets)["Restarts"] == "2"
    assert not cluster.lease(forgets)["checkpoints"]
    assert cluster.lease(forgets)["unrestored"] == told
