"""Observe-only, the shipped default: the cluster behaves as without Cadenza, and `why` tells the rest."""

from __future__ import annotations

import json

from cluster import wait_for
from harness import Cluster


def test_no_further_lane_takes_jobs_and_they_run_as_without_cadenza(cluster: Cluster) -> None:
    cluster.configure('[service]\nmode = "observe"\n')
    wait_for(
        "no further lane takes jobs",
        lambda: [line for line in cluster.ctl("sinfo", "-h", "-N", "-p", "shared", "-o", "%N %T").splitlines()
                 if not line.endswith("drained")] == ["node1 idle", "node2 idle"], 60,
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
    # The report has the third job's wait and its slowdown.
    row = f"select wait_s, slowdown from first_starts where job = {jobs[2]} and ended_s is not null"
    ((wait_s, slowdown),) = wait_for("the end of the third job on record", lambda: cluster.sql(row))
    assert wait_s > 1.0
    assert slowdown >= 1.0
    report = json.loads(cluster.cadenza("report", "--since", "1h", "--json").stdout)
    assert report["idle_gpu_s"] >= 0.0
    width = next(row for row in report["widths"] if row["width"] == "2 to 7 GPUs")
    assert min(width["started"], width["ended"]) >= 3
    assert width["wait_s"] > 0.0
