"""Lanes that are not in slurm.conf: opened and closed beside running jobs, and found again whatever was killed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from conftest import HERE

from cluster import script, wait_for
from harness import PACED_JOB, SOURCE, Cluster

LANE, ALL = "node1-l1", "--gres=gpu:2"
OBSERVE = '[service]\nmode = "observe"\n'


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """Two hosts of two GPUs at a site whose slurm.conf has one node for each, and room for two more."""
    cluster = Cluster(f"cadenzalanes{os.getpid()}")
    try:
        if "PYTEST_XDIST_WORKER" not in os.environ:
            script("build")
        cluster.up(
            "--nodes", 2, "--gpus-per-node", 2, "--memory-mb", 8000, "--lanes-on-demand", "--config", HERE / "fast.toml"
        )
        cluster.put(PACED_JOB, SOURCE.read_text())
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def cluster(site: Cluster) -> Cluster:
    """The site with an empty queue and without lanes."""
    site.reset()
    site.cadenza("lanes", "node1", "node2", "--count", "0")
    wait_for("two nodes", lambda: set(nodes(site)) == {"node1", "node2"}, 30)
    return site


def nodes(cluster: Cluster) -> dict[str, str]:
    """Return the state of each node of the partition."""
    lines = cluster.ctl("sinfo", "-h", "-N", "-p", "shared", "-o", "%N %T").splitlines()
    return dict(line.split() for line in lines)


def add(cluster: Cluster) -> None:
    cluster.cadenza("lanes", "node1", "--count", "1")
    wait_for("an open lane", lambda: nodes(cluster).get(LANE) == "idle", 30, 0.1)


def listed(cluster: Cluster) -> list[dict[str, object]]:
    return list(json.loads(cluster.cadenza("lanes", "--json").stdout)["rows"])


def slurmd(cluster: Cluster) -> str:
    """Return the pid of the lane's slurmd, "" without one."""
    return cluster.exec(
        "node1", "pgrep", "-o", "-f", f"slurmd -f /run/cadenza/lanes/{LANE}/", check=False
    ).stdout.strip()


def start(cluster: Cluster, name: str, node: str, iterations: int) -> int:
    return cluster.paced(name, iterations=iterations, options=(ALL, "--cadenza", f"--nodelist={node}"))


def test_a_lane_comes_on_request_with_the_hardware_of_lane_0_and_jobs_take_turns(cluster: Cluster) -> None:
    both = cluster.paced("both", iterations=10, options=(ALL, "--cadenza", "--nodes=2"))
    cluster.wait_done(both)
    add(cluster)
    shown = cluster.ctl("scontrol", "-o", "show", "node", LANE)
    for word in ("Gres=gpu:a100:2", "ActiveFeatures=lane1", "Weight=101", "RealMemory=4000", "CPUTot=24"):
        assert word in shown
    # The service reads nodes once a second.
    wait_for("the lane in a round", lambda: [row["state"] for row in listed(cluster)] == ["open"], 10)
    assert [(row["node"], row["on_demand"]) for row in listed(cluster)] == [(LANE, True)]
    jobs = [start(cluster, "first", "node1", 250), start(cluster, "second", LANE, 250)]
    # Beside jobs that have had little, the lane comes after those of other hosts.
    wait_for("the lane's weight", lambda: "Weight=108" in cluster.ctl("scontrol", "-o", "show", "node", LANE), 10)
    cluster.wait_done(*jobs)
    for job in jobs:
        assert cluster.sql(f"select count(*) from switches where kind = 'yield' and job = {job}")[0][0] > 0


def test_a_lane_and_its_job_live_through_the_ends_of_all_daemons(cluster: Cluster) -> None:
    add(cluster)
    job, first = start(cluster, "lives", LANE, 350), slurmd(cluster)
    cluster.wait_state(job, "RUNNING")
    cluster.exec("node1", "pkill", "-9", "-f", "bin/cadenza-agent")
    wait_for("a new agent", lambda: cluster.running("node1", "cadenza-agent"), 20)
    cluster.exec("node1", "kill", "-9", slurmd(cluster))
    wait_for("a new slurmd", lambda: slurmd(cluster) not in ("", first), 30)
    opened = cluster.exec("node1", "grep", "-c", "opening lane", "/var/log/cluster/cadenza-agent.log").stdout
    cluster.ctl("scontrol", "reconfigure")
    cluster.signal("ctl", "KILL", "slurmctld")
    wait_for("slurmctld", lambda: cluster.exec("ctl", "scontrol", "ping", check=False).returncode == 0, 30)
    cluster.wait_done(job)
    assert cluster.job(job)["NodeList"] == LANE
    wait_for("the lane", lambda: nodes(cluster).get(LANE) == "idle", 30)
    again = cluster.exec("node1", "grep", "-c", "opening lane", "/var/log/cluster/cadenza-agent.log").stdout
    assert again == opened, "neither a reconfigure nor the end of slurmctld costs the lane its slurmd"
    # A host that loses its power has its lane again when it is back.
    cluster.power("node1", "kill")
    cluster.power("node1", "start")
    wait_for("the lane of the host", lambda: slurmd(cluster) != "" and nodes(cluster).get(LANE) == "idle", 60)


def test_a_lane_is_removed_only_once_no_job_of_any_state_is_there(cluster: Cluster) -> None:
    add(cluster)
    job = start(cluster, "suspended", LANE, 5000)
    cluster.wait_state(job, "RUNNING")
    cluster.ctl("scontrol", "suspend", str(job))
    waits = cluster.paced("waits", iterations=10, options=(ALL, "--cadenza", "--constraint=lane1"))
    cluster.cadenza("lanes", "node1", "--count", "0")
    wait_for("a drained lane", lambda: nodes(cluster).get(LANE, "").startswith("drain"), 20, 0.1)
    rounds = cluster.sql("select max(number) from rounds")[0][0]
    wait_for("five more rounds", lambda: cluster.sql("select max(number) from rounds")[0][0] > rounds + 5, 30)
    assert (cluster.state(job), LANE in nodes(cluster)) == ("SUSPENDED", True)
    assert [(row["state"], row["wanted"]) for row in listed(cluster)] == [("drained", False)]
    cluster.ctl("scancel", str(job))
    wait_for("no lane", lambda: LANE not in nodes(cluster), 30)
    wait_for("no slurmd", lambda: slurmd(cluster) == "", 20)
    wait_for("no folder", lambda: cluster.exec("node1", "ls", "/run/cadenza/lanes").stdout == "", 10)
    # Slurm holds the job that only the lane could run; it is released when the lane is back.
    wait_for("a job held by Slurm", lambda: cluster.job(waits)["Reason"] == "BadConstraints", 20)
    assert cluster.job(waits)["Priority"] == "0"
    add(cluster)
    cluster.wait_done(waits)


def test_lanes_go_while_the_service_observes_and_come_back_after_it(cluster: Cluster) -> None:
    add(cluster)
    cluster.configure(OBSERVE)
    try:
        wait_for("no lane", lambda: set(nodes(cluster)) == {"node1", "node2"}, 30)
    finally:
        cluster.configure("")
    wait_for("an open lane", lambda: nodes(cluster).get(LANE) == "idle", 30)
