"""One two-host cluster for all ring-3 tests; each test starts from an empty queue and the shared settings."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from harness import KEPT, Cluster, down, up, wait_for

HERE = Path(__file__).parent
DAEMONS = (("ctl", "cadenzad"), ("node1", "cadenza-agent"), ("node2", "cadenza-agent"))
SETTINGS = (HERE / "fast.toml").read_text()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(600))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to a failed test what Slurm says of the jobs and what the daemons logged: the cluster is gone afterwards."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and report.when == "call" and isinstance(cluster, Cluster):
        report.sections += [("jobs in Slurm", cluster.queue()), ("logs of the cluster", cluster.logs())]
    return report


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    """Two hosts of four GPUs in two lanes, and one unmanaged host; CADENZA_TEST_CLUSTER reuses a running one."""
    reuse = os.environ.get("CADENZA_TEST_CLUSTER")
    if reuse:
        yield Cluster(reuse)
        return
    name = f"cadenzatest{os.getpid()}"
    try:
        yield up(
            name, "--nodes", "2", "--gpus-per-node", "4", "--lanes", "2", "--unmanaged-nodes", "1",
            "--config", str(HERE / "fast.toml"),
        )  # fmt: skip
    finally:
        down(name)


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """The cluster with an empty queue, every daemon up and the settings of fast.toml."""
    running_cluster.reset()
    for container, program in DAEMONS:
        if not running_cluster.running(container, program):
            running_cluster.service(container, "start", program)
    running_cluster.configure(SETTINGS)
    wait_ready(running_cluster)
    return running_cluster


@pytest.fixture
def kept(cluster: Cluster) -> Iterator[str]:
    """An empty directory for what alice's jobs keep: checkpoints, lists of samples."""
    cluster.exec("ctl", "rm", "-rf", KEPT)
    cluster.exec("ctl", "mkdir", "-m", "777", KEPT)
    yield KEPT
    cluster.exec("ctl", "rm", "-rf", KEPT)


def wait_ready(cluster: Cluster) -> None:
    """Wait until the service has opened every further lane, which needs both agents alive."""

    def open_lanes() -> bool:
        nodes = cluster.ctl("sinfo", "-h", "-N", "-p", "shared", "-o", "%N %T").split("\n")
        return sum(line.endswith(" idle") for line in nodes) == 4

    wait_for("four idle lane nodes", open_lanes, 60)
