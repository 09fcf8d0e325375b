"""An ordinary user watches nodes that nothing of Cadenza is on, and asks what would have been there."""

from __future__ import annotations

import json
import re
from typing import Any

from cadenza.slurm_plugin.report.units import about

from cluster import CADENZA, wait_for
from harness import Cluster

PLAIN = ("--partition=plain", "--mem=500")


def watch(cluster: Cluster, *words: str) -> dict[str, Any]:
    """Return one look of alice's at the plain partition."""
    command = (CADENZA, "watch", "--once", "--json", "--partition=plain", "--state=/tmp/alice-watch.json", *words)
    return dict(json.loads(cluster.exec("ctl", *command, user="alice").stdout))


def test_a_user_sees_idle_gpus_waits_and_what_sharing_would_do(cluster: Cluster) -> None:
    cluster.ctl("rm", "-f", "/tmp/alice-watch.json")
    holder = cluster.sbatch(*PLAIN, "--gres=gpu:3", command="sleep 60")
    cluster.wait_state(holder, "RUNNING")
    waits = cluster.sbatch(*PLAIN, "--gres=gpu:2", command="sleep 1")
    wait_for("Slurm's reason", lambda: cluster.job(waits).get("Reason") in {"Resources", "Priority"})
    seen = watch(cluster)
    assert (seen["gpus"], seen["held_gpus"], seen["idle_gpus"], seen["idle_waiting_gpus"]) == (4, 3, 1, 0)
    (row,) = seen["waiting"]
    assert (row["job"], row["gpus"], row["fits"], seen["steps"]) == (waits, 2, False, []), "nobody leaves so soon"
    # The sums grow from look to look, and hold the jobs that have ended.
    cluster.ctl("scancel", str(holder))
    cluster.wait_done(waits)
    sums = wait_for("both runs on record", lambda: (found := watch(cluster)["totals"])["ended"] == 2 and found)
    assert sums["watched_s"] > 0.0
    (width,) = sums["widths"]
    assert (width["width"], width["ended"]) == ("2 to 7 GPUs", 2)
    assert width["started"] >= 1, "the second one started after the watch began"
    assert not cluster.ctl("squeue", "-h", "--partition=plain").strip(), "a watch submits nothing"


def test_a_what_if_of_the_clusters_own_accounting_is_near_what_was(cluster: Cluster) -> None:
    holder = cluster.sbatch(*PLAIN, "--gres=gpu:3", command="sleep 8")
    cluster.wait_state(holder, "RUNNING")
    load = cluster.sbatch(*PLAIN, "--cpus-per-task=2", command="sleep 5")
    waits = cluster.sbatch(*PLAIN, "--gres=gpu:2", command="sleep 2")
    cluster.wait_done(holder, load, waits)
    sacct = f"sacct --allusers --duplicates --jobs={holder},{load},{waits}"
    ended = ("sh", "-c", f"{sacct} --allocations --noheader --format=State | grep -c COMPLETED || true")
    wait_for("the ends in the accounting", lambda: int(cluster.ctl(*ended)) == len((holder, load, waits)))
    cluster.ctl("sh", "-c", f"{sacct} --json >/tmp/jobs.json && scontrol show node --json >/tmp/nodes.json")
    words = ("--sacct=/tmp/jobs.json", "--nodes=/tmp/nodes.json", "--partition=plain", "--output=/tmp/whatif.html")
    found = json.loads(cluster.ctl(CADENZA, "whatif", *words, "--json"))
    assert (found["jobs"], found["load"]["jobs"], found["left_out"]) == (2, 1, {})
    was_s, slurm_s = found["mean_wait_s"]["as it was"], found["mean_wait_s"]["slurm"]
    assert was_s > 2.0, "one of two jobs has waited for the other"
    assert abs(slurm_s - was_s) < 3.0
    page = cluster.ctl("cat", "/tmp/whatif.html")
    assert f"has jobs wait {about(slurm_s)} on average" in page
    assert f"really waited {about(was_s)}" in page
    # The same as an array of the cluster's own.
    cluster.ctl("rm", "-rf", "/home/shared/whatif")
    array = ("env", "SBATCH_PARTITION=plain", "SBATCH_MEM_PER_NODE=300", CADENZA, "whatif", *words, "--movable=0.5",
             "--draws=1", "--json", "--array=/home/shared/whatif")  # fmt: skip
    assert re.search("0 of 2 simulations are over; job [0-9]+ runs 2;", cluster.ctl(*array))
    last = wait_for("the array's results", lambda: (text := cluster.ctl(*array)).startswith("{") and text)
    assert json.loads(last)["mean_wait_s"]["slurm"] == slurm_s
