"""Observe-only, the shipped default: the cluster behaves as without Cadenza, and `why` tells the rest."""

from __future__ import annotations

from harness import Cluster, wait_for

OBSERVE = """
[service]
mode = "observe"
poll_s = 1.0
min_round_spacing_s = 0.2
[guard]
partitions = ["shared"]
"""


def test_nothing_but_the_further_lanes_drain(cluster: Cluster) -> None:
    cluster.configure(OBSERVE)
    wait_for(
        "the further lanes drained",
        lambda: cluster.ctl("sinfo", "-h", "-N", "-p", "shared", "-t", "drain", "-o", "%N").split()
        == ["node1-l1", "node2-l1"], 60,
    )  # fmt: skip
    options = ("--gres=gpu:4", "--cadenza")
    jobs = [cluster.train(f"observe-{n}", "--iterations 150 --iteration-s 0.02", options=options) for n in range(3)]
    cluster.wait_state(jobs[0], "RUNNING")
    cluster.wait_state(jobs[1], "RUNNING")
    assert cluster.state(jobs[2]) == "PENDING"
    cluster.wait_done(*jobs)
    assert cluster.sql(f"select count(*) from switches where job in ({jobs[0]}, {jobs[1]}, {jobs[2]})") == [[0]]
    allowed = cluster.sql("select count(*) from actions where allowed = 1 and job is not null and round > "
                          "(select max(number) from rounds) - 5")  # fmt: skip
    assert allowed == [[0]]
    assert cluster.why(jobs[2])["reason"]
