"""Jobs move and change their size by checkpoint and requeue on real Slurm, and their losses stay the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_faults import kill

from cluster import wait_for
from harness import Cluster

ITERATIONS = 300


@pytest.fixture(scope="module")
def alone(running_cluster: Cluster) -> str:
    """The digest of the losses of a run without interruption."""
    options = ("--partition=plain", "--gres=gpu:1")
    running_cluster.wait_done(
        running_cluster.train("moves-alone", f"--model transformer --iterations {ITERATIONS}", options=options)
    )
    return str(running_cluster.result("moves-alone")["losses_sha256"])


def start(cluster: Cluster, name: str, kept: str, *options: str) -> int:
    """Start a training job that keeps checkpoints, and wait until Cadenza may move it."""
    job = cluster.train(
        name, f"--model transformer --iterations {ITERATIONS} --iteration-s 0.05 --checkpoint-dir {kept}/{name}",
        options=("--cadenza", *(options or ("--gres=gpu:1",))),
    )  # fmt: skip
    wait_for("a job that saves checkpoints", lambda: cluster.lease(job).get("checkpoints"), 60)
    return job


def moved(cluster: Cluster, job: int) -> dict[str, str]:
    """Wait until a job runs as its second incarnation."""
    wait_for(
        f"job {job} moved; {cluster.why(job).get('summary')}",
        lambda: cluster.job(job).get("Restarts") == "1" and cluster.state(job) == "RUNNING", 60,
    )  # fmt: skip
    return cluster.job(job)


def check_losses(cluster: Cluster, name: str, alone: str, measured: Callable[[str], None]) -> None:
    """Check that a moved job has the losses of the run alone, bit for bit."""
    losses = cluster.result(name)["losses_sha256"]
    measured(f"{name}: losses {losses[:16]} moved, {alone[:16]} alone")
    assert losses == alone


def pause(cluster: Cluster, job: int, name: str) -> str:
    """Return the parts of the time that a move took."""
    saved_at, save_s = cluster.sql(f"select at_s, copy_s from switches where kind = 'checkpoint' and job = {job}")[0]
    found = cluster.result(name)
    start_s, total_s = found["restored_s"] - found["process_s"], found["restored_s"] - saved_at
    return (
        f"{name}: stood still for {total_s + save_s:.2f} s, of which {save_s:.2f} s saving, {start_s:.2f} s start-up "
        f"of the process and restore, {total_s - start_s:.2f} s requeue, placement and launch; from step "
        f"{found['restored_step']:.0f} on"
    )


def test_a_job_goes_to_another_host_bit_for_bit(
    cluster: Cluster, kept: str, alone: str, measured: Callable[[str], None]
) -> None:
    job = start(cluster, "moves-there", kept)
    assert cluster.job(job)["NodeList"] == "node1"
    cluster.cadenza("move", str(job), "--to", "node2")
    assert moved(cluster, job)["NodeList"] == "node2"
    cluster.wait_done(job)
    check_losses(cluster, "moves-there", alone, measured)
    assert cluster.result("moves-there")["restart"] == 1
    measured(pause(cluster, job, "moves-there"))


def test_a_service_killed_in_the_middle_goes_on(
    cluster: Cluster, kept: str, alone: str, measured: Callable[[str], None]
) -> None:
    job = start(cluster, "moves-killed", kept)
    cluster.cadenza("move", str(job), "--to", "node2")
    wait_for(
        "its checkpoint", lambda: cluster.sql(f"select 1 from actions where kind = 'Save' and job = {job}"), 30,
        interval=0.05,
    )  # fmt: skip
    kill(cluster, "ctl", "cadenzad")
    assert moved(cluster, job)["NodeList"] == "node2"
    cluster.wait_done(job)
    check_losses(cluster, "moves-killed", alone, measured)


def test_a_job_grows_and_shrinks(cluster: Cluster, kept: str, alone: str, measured: Callable[[str], None]) -> None:
    job = start(cluster, "moves-sized", kept, "--gpus=1", '--comment={"cadenza":{"min_gpus":1,"max_gpus":4}}')
    cluster.cadenza("move", str(job), "--to", "node2", "--gpus", "4")
    found = moved(cluster, job)
    assert (found["NodeList"], found["CPUs/Task"]) == ("node2", "4")
    assert "gres/gpu=4" in found["AllocTRES"]
    wait_for("ready again", lambda: cluster.lease(job).get("checkpoints"), 60)
    cluster.cadenza("move", str(job), "--to", "node1", "--gpus", "1")
    wait_for("shrunk", lambda: cluster.job(job).get("Restarts") == "2" and cluster.state(job) == "RUNNING", 60)
    found = cluster.job(job)
    assert found["NodeList"] == "node1"
    assert "gres/gpu=1" in found["AllocTRES"]
    cluster.wait_done(job)
    check_losses(cluster, "moves-sized", alone, measured)


def test_an_owner_may_cancel_a_moving_job(cluster: Cluster, kept: str) -> None:
    job = cluster.paced("moves-cancelled", f"--checkpoint {kept}/step", iterations=3000)
    wait_for("a job that saves checkpoints", lambda: cluster.lease(job).get("checkpoints"), 60)
    cluster.cadenza("move", str(job), "--to", "node2")
    wait_for("its requeue", lambda: cluster.job(job).get("Restarts") == "1", 30, interval=0.05)
    cluster.ctl("scancel", str(job), user="alice")
    wait_for("gone", lambda: cluster.state(job) in {"CANCELLED", "GONE"}, 60)


def test_a_directory_that_went_away_leaves_the_job_where_it_is(cluster: Cluster, kept: str) -> None:
    job = start(cluster, "moves-gone", kept)
    cluster.exec("ctl", "sh", "-c", f"rm -rf {kept}/moves-gone; touch {kept}/moves-gone")  # no directory any more
    cluster.cadenza("move", str(job), "--to", "node2")
    wait_for("a refusal", lambda: cluster.sql(
        f"select note from switches where kind = 'refused' and note like '%could not save%' and job = {job}"
    ), 30)  # fmt: skip
    wait_for("a reason", lambda: "not moved" in cluster.why(job).get("summary", ""), 30)
    cluster.wait_done(job)
    assert cluster.result("moves-gone")["restart"] == 0
