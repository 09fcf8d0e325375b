"""Clusters that are set up in other ways than the tests' own: munge, and nodes without a slurm.conf."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import wait_for
from harness import PACED_JOB, SOURCE, Cluster

pytestmark = pytest.mark.sites


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
