"""Each lane has the host's whole memory, and the host really has 1.5 GB: nobody is killed for a neighbor.

Without the guard the kernel kills a process in each of these tests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from conftest import HERE

from cluster import PYTHON, SHARED, script, wait_for
from harness import KEPT, Cluster

SPILL = "--spill=/var/tmp"
SAVE = f"--checkpoint={KEPT}"
JOB = f"{SHARED}/memory_job.py"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One host of 1,500 MB with a GPU; jobs may have 1,250 MB in each of its two lanes."""
    reuse = os.environ.get("CADENZA_TEST_MEMORY")
    made = Cluster(reuse or f"cadenzamemory{os.getpid()}")
    try:
        if not reuse:
            if "PYTEST_XDIST_WORKER" not in os.environ:
                script("build")
            size = ("--nodes", 1, "--gpus-per-node", 1, "--gpu-memory-mb", 0, "--memory-mb", 1250, "--full-memory")
            made.up(*size, "--node-limit-mb", 1500, "--config", HERE / "fast.toml")
        made.put(JOB, (HERE / "memory_job.py").read_text())
        made.configure(settings(slice_s=1))
        wait_for("both lanes", lambda: made.idle_nodes() == 2)
        yield made
    finally:
        if not reuse:
            made.down()


def settings(slice_s: float) -> str:
    return f'[service]\nlanes_memory = "full"\n[sharing]\nslice_s = {slice_s:.1f}\n'


def submit(cluster: Cluster, name: str, asked_mb: int, *arguments: str) -> int:
    return int(
        cluster.sbatch(
            f"--job-name={name}", f"--mem={asked_mb}", "--gres=gpu:1", "--cadenza",
            f"--output={SHARED}/{name}.out", command=f"exec {PYTHON} {JOB} {' '.join(arguments)}",
        )
    )  # fmt: skip


def way_of(way: str, name: str) -> str:
    """Return the job's own way out of the host's memory: its checkpoints are in a directory of its own."""
    return way if way == SPILL else f"{way}/{name}"


def requeues(cluster: Cluster, job: int) -> str:
    """Return the service's reasons for the requeues of a job."""
    rows = cluster.sql(f"select reason from actions where job = {job} and kind in ('Requeue', 'MakeWay') and ok = 1")
    return "; ".join(reason for (reason,) in rows)


def check(cluster: Cluster, name: str) -> None:
    """Compare the digest of a job's state with what it must be."""
    answer = json.loads((cluster.home / f"{name}.out").read_text().splitlines()[-1])
    assert answer["found"] == answer["right"]


def test_a_job_whose_memory_would_not_fit_starts_when_the_other_has_ended(cluster: Cluster) -> None:
    first = submit(cluster, "first", 1000, "--state-mb=150 --grow-mb=500 --iterations=15")
    wait_for("its first steps", lambda: int(cluster.lease(first).get("step") or 0) > 0)
    second = submit(cluster, "second", 1000, "--state-mb=150 --grow-mb=500 --iterations=15")
    reason = "host memory: it asked for 1000 MB, and the jobs here for 1000 MB of 1250 MB"
    wait_for("the reason", lambda: reason in str(cluster.why(second).get("summary")))
    cluster.wait_done(first, second)
    check(cluster, "first")
    check(cluster, "second")


@pytest.mark.parametrize("way", [SPILL, SAVE], ids=["disk", "requeue"])
def test_a_waiting_job_leaves_the_memory_when_the_other_grows_and_both_end(cluster: Cluster, way: str) -> None:
    cluster.configure(settings(slice_s=1))
    cluster.exec("ctl", "rm", "-rf", KEPT)
    cluster.exec("ctl", "mkdir", "-m", "777", KEPT)
    growth = "--grow-mb=600 --grow-by=6 --grow-later"
    grows = submit(cluster, "grows", 1000, "--state-mb=50 --iterations=230", growth, way_of(way, "grows"))
    wait_for("its first steps", lambda: int(cluster.lease(grows).get("step") or 0) > 10)
    waits = submit(cluster, "waits", 600, "--state-mb=250 --iterations=60", way_of(way, "waits"))
    wait_for("its first steps", lambda: int(cluster.lease(waits).get("step") or 0) > 0)

    def waits_for_long() -> bool:
        cluster.configure(settings(slice_s=1))
        wait_for("the end of its turn", lambda: cluster.lease(waits).get("state") == "yielded")
        cluster.configure(settings(slice_s=60))
        return cluster.lease(waits).get("state") == "yielded"

    wait_for("the other's long turn", waits_for_long)
    cluster.wait_done(grows, waits)
    check(cluster, "grows")
    check(cluster, "waits")
    if way == SPILL:
        cluster.exec("node1", "grep", f"spilled JOBID={waits}", "/var/log/cluster/cadenza-agent.log")
        assert cluster.job(waits)["Restarts"] == "0"
    else:
        assert (cluster.job(grows)["Restarts"], cluster.job(waits)["Restarts"]) == ("0", "1")
        assert "of the host's 1250 MB are left, and it waits" in requeues(cluster, waits)
