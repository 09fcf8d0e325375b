"""A site with two controllers: the host of slurmctld and of Cadenza's service is lost, and Slurm's queue goes on."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from datetime import datetime

import pytest
from compressed_times import compress

from cluster import wait_for
from harness import FOUR_GPUS, KEPT, PACED_JOB, SOURCE, Cluster

pytestmark = pytest.mark.sites
SETTINGS = """\
[service]
mode = "apply"
poll_s = 0.5
[guard]
partitions = ["shared"]
[expert]
min_run_s = 0.3
service_timeout_s = 4.0
"""
FACTOR = 150.0
"""The policy's times are divided by it: jobs of some seconds make way."""
TAKEOVER_S = 60
"""Longest time until the backup has the jobs: SlurmctldTimeout is 10 s, and clients try the lost host first."""
INTERVAL_S = 3
"""Time in which Slurm starts the next job once GPUs are free: sched_interval, and two roundings to whole seconds."""
SAVED_S = 8
"""slurmctld has saved its state of the jobs within this time."""
ON_NODE1 = (*FOUR_GPUS, "--nodelist=node1")


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two controllers and one host of four GPUs with the shipped policy, its times divided."""
    reuse = os.environ.get("CADENZA_TEST_PAIR")
    cluster = Cluster(reuse or f"cadenzapair{os.getpid()}")
    settings = tmp_path_factory.mktemp("pair") / "shipped.toml"
    settings.write_text(SETTINGS)
    try:
        if not reuse:
            cluster.up("--controllers", 2, "--nodes", 1, "--gpus-per-node", 4, "--lanes", 1, "--config", settings)
        compress(cluster, FACTOR)
        cluster.put(PACED_JOB, SOURCE.read_text())
        cluster.exec("ctl", "sh", "-c", f"rm -rf {KEPT}; mkdir -m 777 {KEPT}")
        for host in ("ctl2", "node1"):  # a site's name service knows a lost host, the containers' does not
            cluster.exec(host, "sh", "-c", "getent hosts ctl >> /etc/hosts")
        wait_for("the backup", lambda: up(cluster) == {"ctl", "ctl2"})
        yield cluster
    finally:
        if not reuse:
            cluster.down()


def up(cluster: Cluster) -> set[str]:
    """Return the hosts whose slurmctld answers."""
    lines = cluster.ctl("scontrol", "ping", check=False).splitlines()
    return {line.split()[2] for line in lines if line.endswith("UP")}


def train(cluster: Cluster, name: str, iterations: int) -> int:
    """Submit a job that keeps checkpoints, by a name that others have too."""
    return cluster.paced("train", f"--checkpoint {KEPT}/{name}", iterations=iterations)


def site_factor(cluster: Cluster, job: int) -> int:
    """Return a pending job's SiteFactor; 0 for one that sprio does not show."""
    shown = cluster.ctl("sprio", "-h", "-j", str(job), "-o", "%S", check=False).strip()
    return int(shown) if shown.lstrip("-").isdigit() else 0


def served_by(cluster: Cluster, before: str, after: str) -> None:
    """Have the agents go to the service of another host, as an admin does it."""
    cluster.ctl("sed", "-i", f"s|tcp://{before}:|tcp://{after}:|", "/etc/cadenza/cadenza.toml")
    cluster.service("node1", "restart", "cadenza-agent")


@pytest.mark.timeout(600)
def test_the_host_of_the_controller_is_lost_and_slurms_queue_goes_on(pair: Cluster) -> None:
    # 1. One job has made way for another, and is behind it in the queue by its SiteFactor.
    left = train(pair, "left", 2000)
    wait_for("its checkpoints", lambda: pair.lease(left).get("checkpoints"))
    runs = train(pair, "runs", 2500)
    pair.wait_state(runs, "RUNNING", timeout=60)
    queue = [
        pair.paced(f"plain{at}", iterations=100, user="bob", options=options)
        for at, options in enumerate((FOUR_GPUS, ("--gres=gpu:4",), FOUR_GPUS))
    ]
    wait_for("a factor", lambda: site_factor(pair, left) < 0)
    time.sleep(SAVED_S)
    assert pair.state(left) == "PENDING"

    # 2. slurmctld, the service and its watchdog die at once. The backup has all jobs, and none of them is held.
    pair.power("ctl", "kill")
    pair.controller = "ctl2"
    wait_for("the backup slurmctld", lambda: pair.job(left), TAKEOVER_S)
    after = pair.paced("after", iterations=100, user="bob")
    reasons = pair.ctl("squeue", "-h", "-t", "PD", "-o", "%r").split()
    assert len(reasons) == 5
    assert set(reasons) <= {"Resources", "Priority", "None"}
    assert site_factor(pair, left) < 0
    # 3. Slurm starts them one after the other within its interval, by its priorities.
    pair.wait_done(runs, *queue, after, left, timeout=200)
    jobs = [pair.job(job) for job in (runs, *queue, after, left)]
    starts = sorted(jobs, key=lambda job: job["StartTime"])
    assert starts[0]["JobId"] == str(runs)
    for first, then in itertools.pairwise(starts):
        gap = datetime.fromisoformat(then["StartTime"]) - datetime.fromisoformat(first["EndTime"])
        assert gap.total_seconds() <= INTERVAL_S, (first["JobId"], then["JobId"])
    assert [job["Restarts"] for job in jobs] == ["0"] * 5 + ["1"]

    # 4. The service starts on the other host without its record, and jobs make way again.
    compress(pair, FACTOR)
    served_by(pair, "ctl", "ctl2")
    check_making_way(pair, "there")
    # 5. The lost host comes back, with its slurmctld and its service, which goes on with its own record. One service
    # alone may act on a Slurm.
    pair.service("ctl2", "stop", "cadenzad")
    pair.power("ctl", "start")
    pair.controller = "ctl"
    wait_for("both controllers", lambda: up(pair) == {"ctl", "ctl2"}, TAKEOVER_S)
    served_by(pair, "ctl2", "ctl")
    check_making_way(pair, "back")
    wait_for("no factor of a job that is over", lambda: '"factors":[]' in undo(pair).replace(" ", ""), 30)


BOTH = f"""\
{SETTINGS}heartbeat_s = 0.5
[agent]
service = "tcp://ctl:6850,tcp://ctl2:6850"
[policy]
order = "fifo"
share = "timeslice"
[sharing]
slice_s = 1.0
"""
FIRST_ROUND_S = 30
"""Longest time from Slurm's takeover to the first round of the service there."""


@pytest.fixture
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two controllers, each with the service, and one host of four GPUs where jobs take turns on two lanes.

    Each test has a cluster of its own: where slurmdbd is lost with the first controller a second time, Slurm's backup
    finds no associations in the saved state, and waits for slurmdbd.
    """
    cluster = Cluster(f"cadenzaboth{os.getpid()}")
    settings = tmp_path_factory.mktemp("both") / "both.toml"
    settings.write_text(BOTH)
    try:
        cluster.up("--controllers", 2, "--nodes", 1, "--gpus-per-node", 4, "--lanes", 2, "--config", settings)
        for host in ("ctl2", "node1"):  # a site's name service knows a lost host, the containers' does not
            cluster.exec(host, "sh", "-c", "getent hosts ctl >> /etc/hosts")
        wait_for("the backup", lambda: up(cluster) == {"ctl", "ctl2"})
        cluster.put(PACED_JOB, SOURCE.read_text())
        cluster.service("ctl2", "start", "cadenzad")
        yield cluster
    finally:
        cluster.down()


def rounds(cluster: Cluster) -> int:
    """Return the number of rounds of the controller's own service."""
    return int(cluster.sql("select count(*) from rounds")[0][0])


@pytest.mark.timeout(600)
def test_the_service_of_the_other_controller_takes_over_in_mid_turn(
    both: Cluster, measured: Callable[[str], None]
) -> None:
    words, log = "--iterations 1200", "/var/log/cluster/cadenzad.log"
    jobs = [both.train(f"turn-{name}", f"{words} --iteration-s 0.05", options=FOUR_GPUS) for name in ("a", "b")]
    # 1. Both take turns under the service of ctl; that of ctl2 hears the agents and makes no round.
    yields = "select count(*) from switches where kind = 'yield'"
    wait_for("turns", lambda: int(both.sql(yields)[0][0]) > 4, 120)
    assert "stands by: slurmctld of ctl is in control" in both.exec("ctl2", "cat", log).stdout
    # 2. ctl is lost while one of them is suspended. Slurm's backup takes over, and the service there its turns.
    wait_for("a suspend", lambda: "SUSPENDED" in {both.state(job) for job in jobs})
    both.power("ctl", "kill")
    both.controller = "ctl2"
    wait_for("the backup slurmctld", lambda: both.job(jobs[0]), TAKEOVER_S)
    began_s = time.monotonic()
    wait_for("its first round", lambda: rounds(both) > 0, FIRST_ROUND_S)
    measured(f"first round of the other controller's service {time.monotonic() - began_s:.1f} s after Slurm's takeover")
    before = int(both.sql(yields)[0][0])
    wait_for("turns there", lambda: int(both.sql(yields)[0][0]) > before + 4, 120)
    # 3. ctl comes back with its slurmctld and its service: that one acts again, the other stands by.
    both.power("ctl", "start")
    wait_for("both controllers", lambda: up(both) == {"ctl", "ctl2"}, TAKEOVER_S)
    wait_for(
        "the standby", lambda: both.exec("ctl2", "grep", "-c", "this service stands by", log).stdout.strip() == "2"
    )
    both.controller = "ctl"
    # 4. No job is lost, requeued or changed by all that.
    both.wait_done(*jobs, timeout=300)
    assert [both.job(job)["Restarts"] for job in jobs] == ["0", "0"]
    alone = both.train("turn-alone", words, options=("--gres=gpu:4",))
    both.wait_done(alone)
    digests = {both.result(f"turn-{name}")["losses_sha256"] for name in ("a", "b", "alone")}
    assert len(digests) == 1


@pytest.mark.timeout(600)
def test_a_lost_controller_is_restored_on_the_other_machine_and_what_was_ours_is_undone(both: Cluster) -> None:
    saved = "/home/shared/cadenza.tar.gz"
    both.service("ctl2", "stop", "cadenzad")
    both.exec("ctl2", "sh", "-c", "rm -rf /var/lib/cadenzad/cadenza.db*")
    jobs = [both.paced(name, iterations=40_000) for name in ("one", "two")]
    wait_for("turns", lambda: "SUSPENDED" in {both.state(job) for job in jobs}, 90)
    both.exec("ctl", "touch", "/etc/cadenza/STOP")  # the turn that the backup knows is the last one
    before = rounds(both)
    wait_for("rounds that do nothing", lambda: rounds(both) > before + 2)
    both.cadenza("backup", saved)
    time.sleep(SAVED_S)
    both.power("ctl", "kill")
    both.controller = "ctl2"
    wait_for("the backup slurmctld", lambda: both.job(jobs[0]), TAKEOVER_S)
    assert "/var/lib/cadenzad/cadenza.db" in both.cadenza("backup", saved, "--restore", "--dry-run").stdout
    both.cadenza("backup", saved, "--restore")
    assert "SUSPENDED" in {both.state(job) for job in jobs}
    both.cadenza("release", "--all")
    wait_for("both running", lambda: {both.state(job) for job in jobs} == {"RUNNING"})
    both.ctl("scancel", *map(str, jobs))


def undo(cluster: Cluster) -> str:
    """Return the service's record of what is its own to undo, as JSON."""
    return str(cluster.sql("select cast(record as text) from undo")[0][0])


def check_making_way(cluster: Cluster, name: str) -> None:
    """Check that a job that runs leaves for one that waits, and comes back.

    A new service asks again for the site's rules a minute after a time in which Slurm did not tell them.
    """
    first = train(cluster, f"{name}1", 10_000)
    wait_for("its checkpoints", lambda: cluster.lease(first).get("checkpoints"), 90)
    then = train(cluster, f"{name}2", 100)
    cluster.wait_done(then, timeout=120)
    cluster.wait_state(first, "RUNNING")
    assert cluster.job(first)["Restarts"] == "1"
    cluster.ctl("scancel", str(first))
