"""Observe-only, the shipped default: the cluster behaves as without Cadenza, and `why` tells the rest."""

from __future__ import annotations

from cluster import wait_for
from harness import Cluster


def test_nothing_but_the_further_lanes_drain(cluster: Cluster) -> None:
    cluster.configure('[service]\nmode = "observe"\n')
    wait_for(
        "the further lanes drained",
        lambda: cluster.ctl("sinfo", "-h", "-N", "-p", "shared", "-t", "drain", "-o", "%N").split()
        == ["node1-l1", "node2-l1"], 60,
    )  # fmt: skip
    jobs = [cluster.paced(f"observe-{n}", iterations=150) for n in range(3)]
    cluster.wait_state(jobs[0], "RUNNING")
    cluster.wait_state(jobs[1], "RUNNING")
    assert cluster.state(jobs[2]) == "PENDING"
    cluster.wait_done(*jobs)
    assert cluster.sql(f"select count(*) from switches where job in ({jobs[0]}, {jobs[1]}, {jobs[2]})") == [[0]]
    allowed = cluster.sql("select count(*) from actions where allowed = 1 and job is not null and round > "
                          "(select max(number) from rounds) - 5")  # fmt: skip
    assert allowed == [[0]]
    assert cluster.why(jobs[2])["reason"]
