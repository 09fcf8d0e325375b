"""A two-host cluster for each process of pytest; each test starts from an empty queue and the shared settings."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from cluster import script, wait_for
from harness import DEFAULT_POLICY, KEPT, PACED_JOB, SOURCE, Cluster

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add Slurm's view of the jobs and the daemons' logs to a failed test: the cluster is gone afterwards."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and report.when == "call" and isinstance(cluster, Cluster):
        report.sections += [("jobs in Slurm", cluster.queue()), ("logs of the cluster", cluster.logs())]
    return report


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Two hosts of four GPUs in two lanes, and one unmanaged host; CADENZA_TEST_CLUSTER reuses one."""
    reuse = os.environ.get("CADENZA_TEST_CLUSTER")
    cluster = Cluster(reuse or f"cadenzatest{os.getpid()}")
    try:
        if not reuse:
            if "PYTEST_XDIST_WORKER" not in os.environ:  # `make test` has built it before the workers start
                script("build")
            cluster.up(
                "--nodes", 2, "--gpus-per-node", 4, "--unmanaged-nodes", 1, "--login",
                "--config", HERE / "fast.toml", "--config", HERE / "metrics.toml",
            )  # fmt: skip
        cluster.put(PACED_JOB, SOURCE.read_text())
        yield cluster
    finally:
        if not reuse:
            cluster.down()


@pytest.fixture(scope="session")
def gpus() -> Iterator[Cluster]:
    """One host with one GPU in two lanes, and an unmanaged one like it; CADENZA_TEST_GPUS reuses one."""
    reuse = os.environ.get("CADENZA_TEST_GPUS")
    cluster = Cluster(reuse or f"cadenzagpus{os.getpid()}")
    try:
        if not reuse:
            size = ("--nodes", 1, "--gpus-per-node", 1, "--unmanaged-nodes", 1)
            cluster.up(*size, "--config", HERE / "fast.toml")
        cluster.put(PACED_JOB, SOURCE.read_text())
        yield cluster
    finally:
        if not reuse:
            cluster.down()


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """The cluster with an empty queue, every daemon up and the settings of fast.toml."""
    running_cluster.renew()
    return running_cluster


@pytest.fixture
def shipped(running_cluster: Cluster) -> Cluster:
    """The cluster with an empty queue and the shipped policy; only its times are those of fast.toml."""
    running_cluster.reset()
    if running_cluster.settings != DEFAULT_POLICY:
        running_cluster.configure(DEFAULT_POLICY)
    wait_for("four idle lane nodes", running_cluster.ready, 60)
    return running_cluster


@pytest.fixture
def kept(running_cluster: Cluster) -> Iterator[str]:
    """An empty directory for the files of alice's jobs: checkpoints, lists of samples."""
    running_cluster.exec("ctl", "rm", "-rf", KEPT)
    running_cluster.exec("ctl", "mkdir", "-m", "777", KEPT)
    yield KEPT
    running_cluster.exec("ctl", "rm", "-rf", KEPT)
