"""A site's epilog beside a job of the same user on another lane of the host (docs/site-scripts.md)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from cluster import wait_for
from harness import Cluster

CONF = "/etc/slurm/slurm.conf"


@pytest.fixture(params=["epilog-by-node", "epilog"])
def epilog(shipped: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    shipped.ctl("cp", CONF, "/tmp/slurm.conf")
    shipped.ctl("sed", "-i", f"$aEpilog=/src/examples/site/{request.param}", CONF)
    shipped.ctl("scontrol", "reconfigure")
    yield str(request.param)
    shipped.reset()
    shipped.ctl("cp", "/tmp/slurm.conf", CONF)
    shipped.ctl("scontrol", "reconfigure")


def test_an_epilog_by_node_kills_the_neighbor_and_one_by_host_does_not(shipped: Cluster, epilog: str) -> None:
    options = ("--gres=gpu:2", "--cadenza")
    shipped.exec("node1", "sh", "-c", "setsid sleep 600 </dev/null >/dev/null 2>&1 &", user="alice")  # left behind
    neighbor = shipped.paced("neighbor", iterations=200, options=(*options, "--nodelist=node1-l1"))
    wait_for("the neighbor's lease", lambda: shipped.lease(neighbor).get("state") == "held")
    ending = shipped.sbatch("--nodelist=node1", "--mem=100", "--gres=gpu:1", command="true")
    wait_for("the end of the other job", lambda: shipped.state(ending) == "COMPLETED")
    rows = {
        row["job"]: row for row in json.loads(shipped.exec("node1", "cadenza-agent", "--jobs", "--json").stdout)["rows"]
    }
    findings = json.loads(shipped.exec("node1", "cadenza", "doctor", "--gpu", "--json", check=False).stdout)["rows"]
    (found, *more) = [finding for finding in findings if finding["about"].startswith("Epilog")]
    if epilog == "epilog":
        assert (rows[neighbor]["node"], rows[neighbor]["lease"]) == ("node1-l1", "held")
        assert rows[neighbor]["uid"] == 2001
        assert rows[neighbor]["pids"]
        assert shipped.exec("node1", "pgrep", "-u", "alice", "sleep", check=False).stdout, "its other job is there"
        shipped.wait_done(neighbor)
        assert (found["level"], more) == ("OK", [])
        # With the last job of its user it ends what was left behind.
        wait_for("no process of alice's", lambda: shipped.exec("node1", "pgrep", "-u", "alice", check=False).returncode)
    else:
        wait_for("the neighbor's death", lambda: shipped.state(neighbor) == "FAILED", 30)
        assert found["level"] == "WARN"
        assert any("squeue" in finding["observation"] for finding in (found, *more))
