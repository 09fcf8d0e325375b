"""Held admission: the service chooses the node; when it dies nobody stays held."""

from __future__ import annotations

from harness import Cluster, wait_for

HELD = """
[service]
mode = "apply"
admission = "held"
poll_s = 1.0
min_round_spacing_s = 0.2
watchdog_grace_s = 2.0
[guard]
partitions = ["shared"]
min_run_s = 0.5
[sharing]
slice_s = 2.0
share_between_users = true
"""
NATIVE = HELD.replace('"held"', '"native"')


def test_jobs_are_placed_by_affinity(cluster: Cluster) -> None:
    cluster.restart(HELD)
    options = ("--gres=gpu:{}", "--cadenza")
    small = cluster.train("held-small", "--iterations 600 --iteration-s 0.02", options=("--gres=gpu:1", options[1]))
    cluster.wait_state(small, "RUNNING")
    large = cluster.train("held-large", "--iterations 300 --iteration-s 0.02", options=("--gres=gpu:4", options[1]))
    cluster.wait_state(large, "RUNNING")
    second = cluster.train("held-second", "--iterations 300 --iteration-s 0.02", options=("--gres=gpu:1", options[1]))
    cluster.wait_state(second, "RUNNING")
    where = {job: cluster.job(job)["NodeList"] for job in (small, large, second)}
    assert where[large] != where[small], "a four-GPU job goes to a host of its own"
    assert where[second] == where[small], "a one-GPU job joins those of its size"
    cluster.wait_done(small, large, second)


def test_nobody_stays_held_when_the_service_dies(cluster: Cluster) -> None:
    cluster.restart(HELD)
    filler = [
        cluster.train(f"held-filler-{n}", "--iterations 400 --iteration-s 0.02", options=("--gres=gpu:4", "--cadenza"))
        for n in range(4)
    ]
    for job in filler:
        cluster.wait_state(job, "RUNNING", "SUSPENDED")
    waiting = cluster.train("held-waiting", "--iterations 50", options=("--gres=gpu:4", "--cadenza"))
    assert cluster.job(waiting)["Priority"] == "0"
    cluster.exec("ctl", "supervisorctl", "signal", "KILL", "cadenzad")
    cluster.service("ctl", "stop", "cadenzad")
    wait_for("the watchdog's release", lambda: cluster.job(waiting).get("Priority") not in {"0", None}, 60)
    cluster.wait_done(*filler, waiting, timeout=240)
    cluster.service("ctl", "start", "cadenzad")
