"""Held admission: the service chooses the node; when it dies no job stays held."""

from __future__ import annotations

from cluster import wait_for
from harness import FOUR_GPUS, HELD, Cluster

ONE_GPU = ("--gres=gpu:1", "--cadenza")


def test_jobs_are_placed_by_affinity(cluster: Cluster) -> None:
    cluster.configure(HELD)
    small = cluster.paced("held-small", iterations=400, options=ONE_GPU)
    cluster.wait_state(small, "RUNNING")
    large = cluster.paced("held-large", iterations=200)
    cluster.wait_state(large, "RUNNING")
    second = cluster.paced("held-second", iterations=100, options=ONE_GPU)
    cluster.wait_state(second, "RUNNING")
    assert not cluster.job(second).get("AdminComment"), "the plugin's note goes with its hold"
    where = {job: cluster.job(job)["NodeList"] for job in (small, large, second)}
    assert where[large] != where[small], "a four-GPU job goes to a host of its own"
    assert where[second] == where[small], "a one-GPU job joins those of its size"
    cluster.wait_done(small, large, second)


def test_no_job_stays_held_when_the_service_dies(cluster: Cluster) -> None:
    cluster.configure(HELD)
    filler = [cluster.paced(f"held-filler-{n}", iterations=400, options=FOUR_GPUS) for n in range(4)]
    for job in filler:
        cluster.wait_state(job, "RUNNING", "SUSPENDED")
    waiting = cluster.paced("held-waiting", iterations=50)
    assert cluster.job(waiting)["Priority"] == "0"
    cluster.exec("ctl", "supervisorctl", "signal", "KILL", "cadenzad")
    cluster.service("ctl", "stop", "cadenzad")
    wait_for("the watchdog's release", lambda: cluster.job(waiting).get("Priority") not in {"0", None}, 60)
    cluster.wait_done(*filler, waiting, timeout=240)
    cluster.service("ctl", "start", "cadenzad")
