"""Debian's packages on a container cluster: jobs share, and outlive an upgrade and the packages' removal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest
from test_faults import overlaps, yields

from cluster import DEBS, RELEASE, ROOT, script, wait_for
from harness import FOUR_GPUS, PACED_JOB, SOURCE, Cluster

NODES = ("node1", "node2")
PLUGINS = f"cadenza-slurm{RELEASE}"
PACKAGES = ("cadenza", "cadenza-agent", "cadenza-client", PLUGINS)
DIGESTS = ("losses_sha256", "parameters_sha256")
LANES = ("node1", "node1-l1")
RAISE = """
set -e
mkdir -p /opt/raised && cd /opt/raised
for package in cadenza-client cadenza-agent cadenza; do
  dpkg-deb -R /opt/debs/${package}_*.deb $package
  sed -i 's/0\\.1\\.0/0.2.0/g' $package/DEBIAN/control $package/usr/lib/python3/dist-packages/*.dist-info/METADATA
  find $package -path '*/sidecar/orders.py' -exec sed -i 's/^VERSION = 1$/VERSION = 2/' {} +
  dpkg-deb --root-owner-group -b $package >/dev/null
done
"""
"""Makes packages of the next release, with a raised wire version, of those that the container has installed."""

pytestmark = [pytest.mark.packages, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts of four GPUs in two lanes, installed from the packages of `make debs`."""
    script("build")
    script("build-packages", DEBS)
    cluster = Cluster(f"cadenzapackages{os.getpid()}")
    try:
        cluster.up("--from-packages", "--nodes", len(NODES), "--config", ROOT / "tests/cluster/fast.toml")
        cluster.put(PACED_JOB, SOURCE.read_text())
        wait_for("four idle lane nodes", cluster.ready, 60)
        yield cluster
    finally:
        cluster.down()


def holders(cluster: Cluster) -> set[int]:
    """Return the jobs that have their GPUs on node1 by the agent's own book."""
    book = json.loads(cluster.exec("node1", "cat", "/var/lib/cadenza/leases.json").stdout)
    return {one["job"] for one in book["leases"] if one["state"] == "held"}


def take_turns(cluster: Cluster, *jobs: int) -> bool:
    """Return whether each of these jobs has yielded once and once more than that."""
    return all(yields(cluster, job) >= 2 for job in jobs)


def test_jobs_outlive_an_upgrade_to_another_wire_version_service_first(cluster: Cluster) -> None:
    where = cluster.ctl("/opt/cadenza/bin/python", "-c", "import cadenza.sidecar as one; print(*one.__path__)")
    assert where.strip() == "/usr/lib/python3/dist-packages/cadenza/sidecar"
    for container in ("ctl", *NODES):
        cluster.exec(container, "bash", "-c", RAISE)
    jobs = [
        cluster.paced(
            f"upgrade-{lane}", "--claim-dir", "/tmp/claims", iterations=1100,
            options=(*FOUR_GPUS, f"--nodelist={lane}"),
        )
        for lane in LANES
    ]  # fmt: skip
    wait_for("turns", lambda: take_turns(cluster, *jobs), 90)
    # 1. The service is the next release's, the agents are not: they say so, and the jobs take turns without it.
    upgrade(cluster, "ctl", "cadenzad")
    both = "speaks wire version 1, the service 2"
    wait_for("both versions in doctor", lambda: both in cluster.ctl("cadenza", "doctor", check=False), 30)
    assert f"the agent of node1 {both}" in cluster.why(jobs[0])["faults"]
    log = cluster.exec("node1", "cat", "/var/log/cluster/cadenza-agent.log").stdout
    assert log.count("wire version 2, this agent speaks 1") == 1
    seen: set[int] = set()
    wait_for("turns by the agent alone", lambda: seen.update(holders(cluster)) or seen == set(jobs), 30, 0.1)
    # 2. The agents follow; the new ones find the leases of the old.
    before = [yields(cluster, job) for job in jobs]
    for node in NODES:
        upgrade(cluster, node, "cadenza-agent")
    wait_for("open lanes", cluster.ready, 60)
    wait_for("turns", lambda: all(yields(cluster, job) > old for job, old in zip(jobs, before, strict=True)), 60)
    cluster.wait_done(*jobs)
    assert overlaps(cluster, jobs[0]) == []


def upgrade(cluster: Cluster, container: str, daemon: str) -> None:
    """Install the next release in a container and restart its daemon, as docs/operation.md says."""
    cluster.exec(container, "sh", "-c", "dpkg --install /opt/raised/*.deb")
    assert cluster.exec(container, daemon, "--version").stdout.endswith(" 0.2.0\n")
    cluster.service(container, "restart", daemon)


def test_removing_the_packages_leaves_running_jobs_running(cluster: Cluster) -> None:
    # The short one is still there when the packages are removed, also on a busy machine.
    pace, steps = "--iteration-s=0.03", {"short": "--iterations=600", "long": "--iterations=1500"}
    alone = [
        cluster.train(f"{name}-alone", pace, count, "--no-attach", options=("--gres=gpu:1", "--nodelist=node2"))
        for name, count in steps.items()
    ]
    short, long = (
        cluster.train(name, pace, count, options=(*FOUR_GPUS, f"--nodelist={lane}"))
        for lane, (name, count) in zip(LANES, steps.items(), strict=True)
    )
    wait_for("turns", lambda: take_turns(cluster, short, long), 90)
    # 1. The service and the plugins: both jobs go on.
    cluster.service("ctl", "stop", "cadenzad")  # as the unit's package does
    for container in ("ctl", *NODES):
        cluster.exec(container, "dpkg", "--remove", "cadenza", PLUGINS)
    # 2. The agent stays while a job waits for its GPUs, and goes while a job has them.
    refused = cluster.exec("node1", "dpkg", "--remove", "cadenza-agent", check=False)
    assert refused.returncode != 0
    assert "have yielded their GPUs" in refused.stderr
    cluster.wait_done(short)
    wait_for("one job with the GPUs", lambda: holders(cluster) == {long}, 30)
    for node in NODES:
        cluster.service(node, "stop", "cadenza-agent")
        cluster.exec(node, "dpkg", "--remove", "cadenza-agent", "cadenza-client")
    left = cluster.exec("node1", "sh", "-c", f"dpkg-query -W -f '${{Status}}\n' {' '.join(PACKAGES)}").stdout
    assert "installed" not in left.split()
    assert cluster.state(long) == "RUNNING"
    # 3. The jobs end with the results of jobs that were never near Cadenza, and Slurm starts jobs as before.
    cluster.wait_done(long, *alone)
    for name in steps:
        shared, plain = cluster.result(name), cluster.result(f"{name}-alone")
        assert [shared[key] for key in DIGESTS] == [plain[key] for key in DIGESTS]
    cluster.wait_done(cluster.sbatch("--gres=gpu:1", "--nodelist=node1", command="true"))
