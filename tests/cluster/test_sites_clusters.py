"""Clusters that are set up in other ways than the tests' own: munge, nodes without a slurm.conf, a topology."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import wait_for
from harness import PACED_JOB, SOURCE, Cluster

pytestmark = pytest.mark.sites
LANE = "node1-l1"


@pytest.fixture
def own(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """One host with one GPU in two lanes, and further options of container/up."""
    cluster = Cluster(f"cadenzaown{os.getpid()}")
    try:
        fast = Path(__file__).with_name("fast.toml")
        cluster.up("--nodes", 1, "--gpus-per-node", 1, "--config", fast, *request.param)
        cluster.put(PACED_JOB, SOURCE.read_text())
        yield cluster
    finally:
        cluster.down()


def check_turns(cluster: Cluster) -> None:
    """Check that two jobs share the GPU: that both yield, are suspended, and end."""
    wait_for("both lanes", lambda: cluster.idle_nodes() == 2)
    jobs = [cluster.paced("turns", iterations=150, options=("--gres=gpu:1", "--cadenza")) for _ in range(2)]
    for job in jobs:
        wait_for(f"a suspend of job {job}", lambda job=job: cluster.state(job) == "SUSPENDED", interval=0.1)
    cluster.wait_done(*jobs)


@pytest.mark.parametrize("own", [("--auth", "munge")], ids=str, indirect=True)
def test_turns_with_munge(own: Cluster) -> None:
    assert "AuthType = auth/munge" in " ".join(own.ctl("scontrol", "show", "config").split())
    check_turns(own)


@pytest.mark.parametrize("own", [("--configless",)], ids=str, indirect=True)
def test_turns_without_a_slurm_conf_on_the_node(own: Cluster) -> None:
    assert own.exec("node1", "ls", "/etc/slurm").stdout.split() == ["slurm.key"]
    check_turns(own)


@pytest.mark.parametrize("own", [()], ids=["topology"], indirect=True)
def test_a_lane_takes_jobs_that_require_nodes_once_the_topology_names_it(own: Cluster) -> None:
    conf = "/etc/slurm/topology.conf"
    own.put(conf, "SwitchName=rack Nodes=node1\n")
    own.ctl("sed", "-i", "$aTopologyPlugin=topology/tree", "/etc/slurm/slurm.conf")
    own.ctl("scontrol", "reconfigure")
    wait_for("both lanes", lambda: own.idle_nodes() == 2)
    requires = ("--gres=gpu:1", "--cadenza", f"--nodelist={LANE}")
    refused = own.sbatch("--mem=500", *requires, command="true", check=False)
    assert "Requested topology configuration is not available" in refused.stderr
    own.put(conf, f"SwitchName=rack Nodes=node1,{LANE}\n")
    own.ctl("scontrol", "reconfigure")
    job = own.paced("requires", iterations=10, options=requires)
    own.wait_done(job, timeout=40)
    assert (own.job(job)["NodeList"], own.job(job)["Restarts"]) == (LANE, "0"), "its slurmd found the new file at once"
    check_turns(own)
