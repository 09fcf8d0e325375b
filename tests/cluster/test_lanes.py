"""Lanes of a host with one GPU: jobs take turns on them, and the service drains them while it observes."""

from __future__ import annotations

import pytest

from cluster import wait_for
from harness import Cluster

LANE = "node1-l1"
OBSERVE = '[service]\nmode = "observe"\n'
SHARED_GPU = ("--gres=gpu:1", "--cadenza")


@pytest.fixture
def cluster(gpus: Cluster) -> Cluster:
    """One host with one GPU in two lanes, with an empty queue and the settings of fast.toml."""
    gpus.reset()
    if gpus.settings != "":
        gpus.configure("")
    return gpus


def state(cluster: Cluster, node: str) -> str:
    return cluster.ctl("sinfo", "-h", "-N", "-n", node, "-o", "%T").strip()


def test_jobs_on_both_lanes_take_turns(cluster: Cluster) -> None:
    wait_for("an open lane", lambda: state(cluster, LANE) == "idle", 60)
    jobs = [
        cluster.paced("turns", iterations=250, options=(*SHARED_GPU, f"--nodelist={node}")) for node in ("node1", LANE)
    ]
    cluster.wait_done(*jobs)
    for job in jobs:
        assert cluster.sql(f"select count(*) from switches where kind = 'yield' and job = {job}")[0][0] > 0


def test_the_lane_is_drained_while_the_service_observes_and_jobs_run_as_without_cadenza(cluster: Cluster) -> None:
    cluster.configure(OBSERVE)
    try:
        wait_for("a drained lane", lambda: state(cluster, LANE) == "drained", 60)
        assert "cadenza" in cluster.ctl("sinfo", "-h", "-N", "-n", LANE, "-o", "%E")
        jobs = [cluster.paced("observed", iterations=100, options=SHARED_GPU) for _ in range(2)]
        cluster.wait_state(jobs[0], "RUNNING")
        assert cluster.state(jobs[1]) == "PENDING"
        cluster.wait_done(*jobs)
        assert {cluster.job(job)["NodeList"] for job in jobs} == {"node1"}
        assert cluster.sql(f"select count(*) from switches where job in ({jobs[0]}, {jobs[1]})") == [[0]]
    finally:
        cluster.configure("")
    wait_for("an open lane", lambda: state(cluster, LANE) == "idle", 60)
