"""Two services on one controller, each for partitions of its own: neither touches what is the other's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import HERE

from cluster import CADENZA, PYTHON, wait_for
from harness import PACED_JOB, SOURCE, Cluster

pytestmark = pytest.mark.sites
B = "/etc/cadenza/b/cadenza.toml"
STORES = {"a": "/var/lib/cadenzad/cadenza.db", "b": "/var/lib/cadenzad-b/cadenza.db"}
OTHER = f"""
[agent]
service = "tcp://ctl:6851"
[service]
bind = "tcp://*:6851"
store = "{STORES["b"]}"
"""
EXPERT = '[expert]\njobs_socket = "/run/cadenzad-b/jobs.sock"\nslurm_cpus = 24'

QUERY = "import json, sqlite3, sys; print(json.dumps(sqlite3.connect(f'file:{sys.argv[1]}?mode=ro', uri=True)"
QUERY += ".execute(sys.argv[2]).fetchall()))"
SPLIT = r"""
cd /etc/slurm
line=$(sed -n '/^PartitionName=shared/s/ Default=YES//p' slurm.conf)
sed -i '/^PartitionName=shared/d' slurm.conf
for name in a b; do
  host=node$(tr ab 12 <<<$name)
  sed "s/=shared/=$name/; s/Nodes=.*/Nodes=$host,$host-l1/" <<<"$line" >>slurm.conf
done
sed -i 's/^partitions=.*/partitions=a,b/' /etc/cadenza/lua.conf
install -d -o cadenza -g cadenza /var/lib/cadenzad-b /run/cadenzad-b
conf=/etc/supervisor/supervisord.conf
change="s/cadenzad]/cadenzad-b]/; s|bin/cadenzad$|& --config $1|; s|/cadenzad.log|/cadenzad-b.log|"
sed -n "/^.program:cadenzad]/,/^autostart/{$change; p}" $conf >>$conf
supervisorctl update
scontrol reconfigure
"""
"""One partition becomes two of a host each, and the controller gets a second service."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two hosts of a GPU in two lanes, each with a partition and a service of its own."""
    made = Cluster(f"cadenzatwo{os.getpid()}")
    fast = (HERE / "fast.toml").read_text()
    try:
        made.up("--nodes", 2, "--gpus-per-node", 1, "--no-cadenza")
        made.put("/etc/cadenza/conf.d/fast.toml", fast.replace('"shared"', '"a"'))
        text = fast.replace('"shared"', '"b"').replace("[service]", OTHER.strip(), 1)
        made.put(B, text.replace("[expert]", EXPERT, 1))
        made.ctl("bash", "-euo", "pipefail", "-c", SPLIT, "bash", B)
        change = f"s|bin/cadenza-agent$|& --config {B}|"
        made.exec("node2", "sed", "-i", change, "/etc/supervisor/supervisord.conf")
        made.exec("node2", "supervisorctl", "update")
        for container, program in (
            ("ctl", "cadenzad"), ("ctl", "cadenzad-b"), ("node1", "cadenza-agent"), ("node2", "cadenza-agent"),
        ):  # fmt: skip
            made.service(container, "start", program)
        made.put(PACED_JOB, SOURCE.read_text())
        wait_for("four open lanes", lambda: states(made) == ["idle"] * 4, 60)
        yield made
    finally:
        made.down()


def states(cluster: Cluster) -> list[str]:
    return cluster.ctl("sinfo", "-h", "-N", "-o", "%T").split()


def rows(cluster: Cluster, service: str, query: str) -> list[list[Any]]:
    """Read a service's store; no rows while there is none."""
    return list(json.loads(cluster.ctl(PYTHON, "-c", QUERY, STORES[service], query, check=False) or "[]"))


def yields(cluster: Cluster, service: str) -> int:
    return sum(row[0] for row in rows(cluster, service, "select count(*) from switches where kind = 'yield'"))


def pair(cluster: Cluster, partition: str, iterations: int) -> list[int]:
    """Submit two jobs that want the GPU of a partition."""
    options = (f"--partition={partition}", "--gres=gpu:1", "--cadenza")
    return [cluster.paced(f"{partition}{at}", iterations=iterations, options=options) for at in range(2)]


def findings(cluster: Cluster, *config: str) -> list[tuple[str, str]]:
    shown = json.loads(cluster.cadenza("doctor", "--json", *config, check=False).stdout)["rows"]
    return [(one["level"], one["observation"]) for one in shown if one["about"] == "services"]


def test_each_serves_its_own_jobs_and_leaves_the_others_lanes_open(cluster: Cluster) -> None:
    jobs = {name: pair(cluster, name, 400) for name in ("a", "b")}
    # The user of a job in b asks the service of b, at its socket.
    asks = (CADENZA, "why", str(jobs["b"][0]), "--config", B)
    wait_for("b's word", lambda: "takes turns with" in cluster.ctl(*asks, user="alice", check=False), 30)
    cluster.wait_done(*jobs["a"], *jobs["b"])
    for name, own in jobs.items():
        switched = {row[0] for row in rows(cluster, name, "select distinct job from switches where kind = 'yield'")}
        assert switched & set(own)
        assert switched <= set(own)
    for name, foreign in (("a", "node2"), ("b", "node1")):
        assert rows(cluster, name, f"select node, kind from actions where node like '{foreign}%'") == []
    assert states(cluster) == ["idle"] * 4


def test_one_that_stops_and_loses_its_record_costs_the_other_no_turn(cluster: Cluster) -> None:
    jobs = {name: pair(cluster, name, 1500) for name in ("a", "b")}
    before = yields(cluster, "b")
    wait_for("turns in b", lambda: yields(cluster, "b") > before + 2)
    cluster.service("ctl", "stop", "cadenzad")
    cluster.ctl("sh", "-c", f"rm -rf {STORES['a']}*")
    before = yields(cluster, "b")
    wait_for("turns in b without the other", lambda: yields(cluster, "b") > before + 2)
    cluster.service("ctl", "start", "cadenzad")
    wait_for("turns in a again", lambda: yields(cluster, "a") > 2)
    before = yields(cluster, "b")
    wait_for("turns in b beside the new one", lambda: yields(cluster, "b") > before + 2)
    cluster.wait_done(*jobs["a"], *jobs["b"])
    undone = "select count(*) from actions where kind = 'Unsuspend' and job in ({}, {})".format(*jobs["b"])
    assert rows(cluster, "a", undone) == [[0]]


def test_doctor_accepts_the_two_and_refuses_them_once_they_have_a_host_in_common(cluster: Cluster) -> None:
    assert findings(cluster) == [("OK", f"{B} manages other hosts")]
    assert findings(cluster, "--config", B) == [("OK", "/etc/cadenza/cadenza.toml manages other hosts")]
    cluster.ctl("sed", "-i", r's/^partitions = .*/partitions = ["a", "b"]/', B)
    try:
        ((level, text),) = findings(cluster)
        assert (level, text) == ("FAIL", f"{B} manages node1, too: both services would give out the GPUs there")
        assert cluster.cadenza("doctor", check=False).returncode == 1
    finally:
        cluster.ctl("sed", "-i", r's/^partitions = .*/partitions = ["b"]/', B)
