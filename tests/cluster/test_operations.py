"""Hosts that an admin empties by `cadenza host`: who can save leaves, and only its own marks are undone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import wait_for
from harness import FOUR_GPUS, Cluster

REASON = ("--reason", "fan")
CONF = "/etc/slurm/slurm.conf"
REBOOTED = "/home/shared/rebooted"


def keeps(cluster: Cluster, kept: str, name: str) -> tuple[int, str]:
    """Start a job that keeps checkpoints and return it with its host."""
    job = cluster.paced(name, f"--checkpoint {kept}/{name}", iterations=900)
    wait_for("its checkpoints", lambda: cluster.lease(job).get("checkpoints"))
    return job, cluster.job(job)["NodeList"].partition("-")[0]


def moved(cluster: Cluster, job: int, host: str) -> None:
    """Wait until a job has left a host and runs on another one."""
    there = lambda: cluster.job(job)["NodeList"].partition("-")[0]  # noqa: E731
    wait_for("its next start", lambda: cluster.job(job).get("Restarts") == "1", 60)
    wait_for("its other host", lambda: there() not in ("", "(null)", host) and cluster.state(job) == "RUNNING", 60)


def test_a_drained_host_loses_the_jobs_that_can_save_and_names_the_others(cluster: Cluster, kept: str) -> None:
    saves, host = keeps(cluster, kept, "saves")
    lane = next(name for name in (host, f"{host}-l1") if name != cluster.job(saves)["NodeList"])
    stays = cluster.paced("stays", iterations=400, user="bob", options=(*FOUR_GPUS, f"--nodelist={lane}", "--time=9"))
    wait_for("its lease", lambda: cluster.lease(stays).get("ready"))
    words = ("host", "drain", host, *REASON)
    planned = cluster.cadenza(*words, "--dry-run").stdout
    assert f"job {saves} (alice, saves)" in planned
    assert "saves and leaves" in planned
    assert f"job {stays} (bob, stays) on {lane}: stays, until " in planned
    assert "DRAIN" not in cluster.ctl("scontrol", "show", "node", host)
    cluster.cadenza(*words)
    assert "Reason=cadenza host: fan" in cluster.ctl("scontrol", "show", "node", host)
    moved(cluster, saves, host)
    assert cluster.job(stays)["Restarts"] == "0"
    cluster.wait_done(stays)
    cluster.cadenza("host", "undrain", host)
    cluster.wait_done(saves)
    wait_for("all lanes open", cluster.ready)


@pytest.mark.sites
def test_jobs_leave_for_a_maintenance_and_undrain_ends_it(cluster: Cluster, kept: str) -> None:
    saves, host = keeps(cluster, kept, "saves")
    cluster.cadenza("host", "maintenance", host, *REASON, "--during", "1h")
    assert f"Nodes={host},{host}-l1" in cluster.ctl("scontrol", "show", "reservation", f"cadenza_{host}")
    moved(cluster, saves, host)
    cluster.cadenza("host", "undrain", host)
    assert f"cadenza_{host}" not in cluster.ctl("scontrol", "show", "reservation")
    cluster.ctl("scancel", str(saves))
    # The drain of another hand stays.
    cluster.ctl("scontrol", "update", f"nodename={host}", "state=drain", "reason=theirs")
    assert "by another hand: theirs" in cluster.cadenza("host", "undrain", host).stdout
    assert "Reason=theirs" in cluster.ctl("scontrol", "show", "node", host)
    cluster.ctl("scontrol", "update", f"nodename={host}", "state=resume")


@pytest.fixture
def rebooting(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with a RebootProgram that notes the host's jobs where a host would reboot."""
    cluster.ctl("cp", CONF, "/tmp/slurm.conf")
    cluster.put("/etc/slurm/reboot", f"#!/bin/sh\nsqueue -h -w $(hostname),$(hostname)-l1 -o %i >{REBOOTED}\n")
    cluster.ctl("chmod", "755", "/etc/slurm/reboot")
    cluster.ctl("sed", "-i", "$aRebootProgram=/etc/slurm/reboot", CONF)
    cluster.ctl("scontrol", "reconfigure")
    yield cluster
    cluster.reset()
    cluster.ctl("rm", "-rf", REBOOTED, "/etc/slurm/reboot")
    cluster.ctl("cp", "/tmp/slurm.conf", CONF)
    cluster.ctl("scontrol", "reconfigure")


@pytest.mark.sites
def test_a_host_reboots_once_all_its_lanes_are_empty(rebooting: Cluster) -> None:
    cluster = rebooting
    job = cluster.paced("neighbor", iterations=250, options=("--gres=gpu:1", "--cadenza", "--nodelist=node1-l1"))
    wait_for("its first steps", lambda: cluster.lease(job).get("step"))
    said = cluster.cadenza("host", "reboot", "node1", "--reason", "kernel").stdout
    assert f"node1: waits for {job} on its further lanes" in said
    assert wait_for("the reboot", lambda: cluster.exec("node1", "cat", REBOOTED, check=False).returncode == 0)
    assert cluster.exec("node1", "cat", REBOOTED).stdout == ""
    # A container does not boot: this slurmd only says that its host did.
    cluster.service("node1", "stop", "slurmd-lane0")
    cluster.exec("node1", "slurmd", "-N", "node1", "-b")
    wait_for("all lanes open", cluster.ready)
    cluster.exec("node1", "pkill", "-f", "slurmd -N node1 -b")
    cluster.service("node1", "start", "slurmd-lane0")
