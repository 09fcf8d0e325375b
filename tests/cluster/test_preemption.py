"""Making way on real Slurm, as shipped: Slurm starts every job, and running jobs leave for the first of its queue.

Levels and quanta are those of the product. With 64 GPUs, the most that a job may have on a host, level 2 is reached in
a minute. A job's quantum is ten times the cost of its last move, so each job that is to leave is moved by hand first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
from test_receipt import lines

from cluster import wait_for
from harness import KEPT, PACED_JOB, SOURCE, Cluster

SETTINGS = """\
[service]
mode = "apply"
poll_s = 0.2
[guard]
partitions = ["shared"]
[expert]
min_run_s = 0.3
"""
GPUS = 64
HALF = ("--nodes=1", "--gres=gpu:32", "--cadenza")
QUANTUM_COSTS = 10
ITERATIONS = 450


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two hosts of 64 GPUs with the shipped policy and one lane; one of them is taken by a job that did not opt in."""
    reuse = os.environ.get("CADENZA_TEST_LARGE")
    cluster = Cluster(reuse or f"cadenzalarge{os.getpid()}")
    settings = tmp_path_factory.mktemp("large") / "shipped.toml"
    settings.write_text(SETTINGS)
    try:
        if not reuse:
            cluster.up("--nodes", 2, "--gpus-per-node", GPUS, "--lanes", 1, "--config", settings)
        cluster.put(PACED_JOB, SOURCE.read_text())
        cluster.exec("ctl", "sh", "-c", f"rm -rf {KEPT}; mkdir -m 777 {KEPT}")
        yield cluster
    finally:
        if not reuse:
            cluster.down()


def plain(cluster: Cluster, seconds: int, *options: str) -> int:
    """Submit a job of bob's that did not opt in."""
    options = ("--nodes=1", "--mem=100", *options)
    return int(cluster.sbatch(*options, user="bob", command=f"sleep {seconds}"))


def moved(cluster: Cluster, *jobs: int) -> None:
    """Move jobs to node2 by hand, so that the cost of their moves is known, and fill node1."""
    for job in jobs:
        wait_for(f"checkpoints of job {job}", lambda job=job: cluster.lease(job).get("checkpoints"))
        cluster.cadenza("move", str(job), "--to", "node2")
    for job in jobs:
        wait_for(f"job {job} on node2", lambda job=job: cluster.job(job)["NodeList"] == "node2", 90)
    cluster.wait_state(plain(cluster, 1000, "--nodelist=node1", f"--gres=gpu:{GPUS}"), "RUNNING")
    for job in jobs:
        wait_for(f"checkpoints of job {job} again", lambda job=job: cluster.lease(job).get("checkpoints"))


def site_factor(cluster: Cluster, job: int) -> int:
    """Return a pending job's SiteFactor, as Slurm shows it to users once it may start again after its requeue."""
    words = ("sprio", "-h", "-j", str(job), "-o", "%S")

    def shown() -> str:
        found = cluster.ctl(*words, user="alice", check=False).strip()
        return found if found.lstrip("-").isdigit() else ""

    return int(wait_for(f"job {job} in sprio", shown, 20))


def runs(cluster: Cluster, job: int) -> list[tuple[int, int]]:
    """Return the start and the end of each of a job's runs, in seconds since the epoch; of the last one the start."""
    fields = ("sacct", "-XnPD", "-j", str(job), "-o", "Start,End")
    command = f"SLURM_TIME_FORMAT=%s {' '.join(fields)}"
    rows = [line.split("|") for line in cluster.ctl("sh", "-c", command).split()]
    return [(int(start), int(end) if end.isdigit() else 0) for start, end in rows if start.isdigit()]


def ways(cluster: Cluster, job: int) -> list[float]:
    """Return when jobs were requeued to make way for a job."""
    query = "select at_s from actions where kind = 'MakeWay' and ok and json_extract(action, '$.for_job[0]') = "
    return [row[0] for row in cluster.sql(f"{query}{job} order by at_s")]


def cost_s(cluster: Cluster, job: int, restart: int) -> float:
    """Return the cost of the move that ended in a run of a job, from the agents' and the service's records."""
    ordered, requeued = (
        cluster.sql(
            f"select max(at_s) from actions where kind in ({kinds}) and ok and job = {job} and restart < {restart}"
        )[0][0]
        for kinds in ("'Save'", "'Requeue', 'MakeWay'")
    )
    ready = cluster.sql(
        f"select min(at_s) from events where kind = 'ready' and job = {job} and restart = {restart} and detail = ''"
    )[0][0]
    return float(requeued - ordered + ready - runs(cluster, job)[restart][0])


def test_a_job_makes_way_for_one_that_did_not_opt_in_and_slurm_brings_it_back(large: Cluster) -> None:
    large.reset()
    job = large.paced("alone", f"--checkpoint {KEPT}/alone", iterations=4000, options=(*HALF, f"--gres=gpu:{GPUS}"))
    moved(large, job)
    short = plain(large, 4, "--gres=gpu:1", "--time=1")
    large.wait_state(short, "RUNNING", timeout=120)
    # 1. It had its GPUs for its quantum, and waits behind the other in Slurm's own queue.
    assert large.job(job)["JobState"] == "PENDING"
    assert site_factor(large, job) < 0
    left_s = runs(large, job)[1]
    assert left_s[1] - left_s[0] >= QUANTUM_COSTS * cost_s(large, job, 1) - 1
    # 2. Without a service nothing changes for it: Slurm starts it once its GPUs are free.
    large.exec("ctl", "supervisorctl", "signal", "KILL", "cadenzad")
    large.service("ctl", "stop", "cadenzad")
    large.wait_done(short)
    large.wait_state(job, "RUNNING", "COMPLETED", timeout=20)  # on a slow machine its quantum was most of its time
    large.service("ctl", "start", "cadenzad")
    # 3. It goes on from its checkpoint, and its user reads on its output why it went, and that it is back.
    large.wait_done(job)
    gone, back = lines(large, job)[2:]  # after those of the move by hand
    assert re.fullmatch(
        rf"cadenza: gives its GPUs up for job {short}; checkpoint of step \d+ saved in \d+\.\d s; "
        rf"comes back by itself \(`cadenza why {job}`\)",
        gone,
    ), gone
    away = re.fullmatch(r"cadenza: continues at step \d+ after (\d+) s", back)
    assert away, back
    assert abs(int(away[1]) - (runs(large, job)[2][0] - left_s[1])) < 15, "since its checkpoint"
    assert large.job(job)["Restarts"] == "2"
    assert sum(end - start for start, end in runs(large, job)) < 1.5 * 4000 * 0.02 + 10


@pytest.mark.sites
def test_jobs_leave_together_for_a_wide_one_and_end_as_if_they_had_run_alone(large: Cluster) -> None:
    large.reset()
    training = f"--model mlp --iterations {ITERATIONS}"
    unmoved = large.train("way-unmoved", training, options=("--gres=gpu:1", "--nodelist=node2"))
    jobs = (
        large.train("way-trains", f"{training} --iteration-s 0.3 --checkpoint-dir {KEPT}/trains", options=HALF),
        large.paced("train", f"--checkpoint {KEPT}/paced", iterations=6000, options=HALF),
    )
    large.wait_done(unmoved)
    moved(large, *jobs)
    # 1. A wide job that keeps checkpoints, by its name, and behind it jobs of an hour that did not opt in.
    wide = large.paced("train", f"--checkpoint {KEPT}/wide", iterations=400, options=(*HALF, f"--gres=gpu:{GPUS}"))
    behind = [plain(large, 1, "--gres=gpu:8", "--time=60") for _ in range(2)]
    wait_for("its reason", lambda: "quantum" in large.why(wide).get("summary", ""), 30)
    # 2. Both leave by one command, and the wide job has their GPUs; the others wait behind it.
    large.wait_state(wide, "RUNNING", timeout=180)
    assert len(ways(large, wide)) == 1
    assert {large.state(job) for job in (*jobs, *behind)} == {"PENDING"}
    assert all(site_factor(large, job) < 0 for job in jobs)
    # 3. The kill switch takes back what was written into Slurm's queue.
    large.cadenza("release", "--all")
    try:
        assert [site_factor(large, job) for job in jobs] == [0, 0]
    finally:
        large.exec("ctl", "rm", "-f", "/etc/cadenza/STOP")
    # 4. They come back and lose nothing.
    large.wait_done(wide, *behind, *jobs, timeout=300)
    assert [large.job(job)["Restarts"] for job in jobs] == ["2", "2"]
    found = large.result("way-trains")
    assert found["restart"] == 2
    assert found["losses_sha256"] == large.result("way-unmoved")["losses_sha256"]
