"""``cadenza lanes``, and lanes on demand in top, why and doctor, over a store that a real round wrote."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_rig import cluster, fill, job, write_config
from click.testing import CliRunner, Result

from cadenza.policies.core.model import ClusterSnapshot
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.service.lanes_on_demand import folder, requests
from cadenza.slurm_plugin.service.settings import load_settings
from cadenza.slurm_plugin.site.checks import lanes_on_demand
from cadenza.slurm_plugin.site.facts import Facts
from cadenza.slurm_plugin.site.lane_plan import SlurmNode, on_demand, plan_lanes

SEEN = cluster(job(1, "first", "held"))
FIRST, LANE = SEEN.nodes[0], replace(SEEN.nodes[1], dynamic=True)


def seen(*nodes: object, wanted: int = 1, **host: object) -> ClusterSnapshot:
    one = replace(SEEN.hosts[0], further_lanes=wanted, **host)  # type: ignore[arg-type]
    return replace(SEEN, nodes=nodes, hosts=(one,))  # type: ignore[arg-type]


def run(config: Path, *words: str) -> Result:
    return CliRunner().invoke(main, [*words, "--config", str(config)])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    found = write_config(tmp_path, 'mode = "apply"')
    folder(Path(load_settings(found).service.store)).mkdir()
    return found


def test_requests_are_checked_against_the_last_round(config: Path) -> None:
    store = Path(load_settings(config).service.store)
    assert "is cadenzad running" in run(config, "lanes").output or run(config, "lanes").exit_code
    fill(config, seen(FIRST, wanted=0), apply=True)
    assert run(config, "lanes", "n1", "--count", "2").exit_code == 0
    assert requests(store) == {"n1": 2}
    assert run(config, "lanes", "n1", "--count", "0").exit_code == 0
    assert requests(store) == {"n1": 0}
    assert "n7: the last round saw no such host" in run(config, "lanes", "n1", "n7", "--count", "0").output
    fill(config, replace(seen(FIRST, replace(LANE, dynamic=False), wanted=0)), apply=True)
    refused = run(config, "lanes", "n1", "--count", "1")
    assert (refused.exit_code, "slurm.conf has its lane n1-l1" in refused.output) == (1, True)
    assert requests(store) == {"n1": 0}


@pytest.mark.parametrize(
    ("snapshot", "row"),
    [
        (seen(FIRST, LANE), ("n1-l1", True, True, "open", "")),
        (seen(FIRST, replace(LANE, dynamic=False), wanted=0), ("n1-l1", False, True, "open", "")),
        (seen(FIRST, replace(LANE, drained=True, drain_reason="x"), wanted=0), ("n1-l1", True, False, "drained", "is")),
        (seen(FIRST, replace(LANE, up=False)), ("n1-l1", True, True, "down", "is down")),
        (seen(FIRST, lane_faults=("n1-l1: no GPU",)), ("n1-l1", True, True, "absent", "n1-l1: no GPU")),
    ],
)
def test_the_list_has_every_further_lane_that_is_there_or_wanted(
    config: Path, snapshot: ClusterSnapshot, row: tuple[str, bool, bool, str, str]
) -> None:
    fill(config, snapshot, apply=True)
    (found,) = json.loads(run(config, "lanes", "--json").stdout)["rows"]
    assert (found["node"], found["on_demand"], found["wanted"], found["state"]) == row[:4]
    assert found["reason"].startswith(row[4])
    assert bool(found["reason"]) == bool(row[4])
    assert run(config, "lanes").stdout.startswith(f"n1-l1: {row[3]}")
    assert json.loads(run(config, "lanes", "n2", "--json").stdout)["rows"] == []


def test_top_why_and_doctor_name_a_lane_that_could_not_be_opened(config: Path) -> None:
    fault = "n1-l1: it cannot be opened: slurmd: no GPU"
    fill(config, seen(FIRST, lane_faults=(fault,)), apply=True)
    for words in (("top", "--once"), ("why", "1")):
        assert fault in " ".join(run(config, *words).stdout.split())


def findings(config: Path, snapshot: ClusterSnapshot, **slurm: str) -> list[tuple[str, str, str]]:
    facts = Facts(load_settings(config), "0.1.0", 0.0, slurm=slurm, recorded=snapshot)
    return [(one.level, one.about, one.observation) for one in lanes_on_demand(facts)]


def test_doctor_knows_the_traps_of_lanes_on_demand(tmp_path: Path) -> None:
    config = write_config(tmp_path, 'mode = "apply"\nlanes_on_demand = 1')
    assert findings(config, seen(FIRST, LANE), MaxNodeCount="2", TopologyPlugin="topology/flat") == []
    (limit,) = findings(config, seen(FIRST, LANE), MaxNodeCount="1")
    assert limit == ("FAIL", "MaxNodeCount", "1: 1 nodes and 1 lanes do not fit")
    (tree,) = findings(config, seen(FIRST, LANE), TopologyPlugin="topology/tree")
    assert tree[:2] == ("WARN", "TopologyPlugin")
    (absent,) = findings(config, seen(FIRST))
    assert absent[:2] == ("WARN", "lanes of n1")
    everywhere = replace(FIRST, partitions=("all", "gpu"))
    (foreign,) = findings(config, seen(everywhere, wanted=0))
    assert foreign[2] == "none are opened on demand: n1 is in all, and not in managed partitions only"


def test_setup_prints_the_lines_of_a_site_whose_lanes_are_not_in_slurm_conf() -> None:
    """The memory of lane 0 is divided once: where there is room for the lanes, that has been done."""
    host = SlurmNode("gpu1", 16, 64_000, hostname="gpu1", port=6818, gres="gpu:a100:4", partitions=("shared",))
    plain = {"SlurmdSpoolDir": "/s", "SlurmdPidFile": "/p", "AuthType": "auth/slurm", "MaxNodeCount": "1"}
    for config, nodes, memory_mb in ((plain, (host,), 32_000), ({**plain, "MaxNodeCount": "3"}, (host,), 64_000)):
        plan = on_demand(plan_lanes(nodes, config, ("shared",), 2, ()), nodes, config)
        lines = plan.slurm_conf()
        assert lines[:3] == [
            "# PartitionName=shared needs Nodes=gpu1,lanes1",
            "NodeName=no-lane1 Feature=lane1 State=FUTURE",
            "NodeSet=lanes1 Feature=lane1",
        ]
        (node,) = (line for line in lines if line.startswith("NodeName=gpu1"))
        assert f"RealMemory={memory_mb} " in node
        assert "Feature=lane0" in node
        assert ("MaxNodeCount=3" in lines) == (memory_mb == 32_000)
        assert not any(line.startswith(("SlurmdSpoolDir", "SlurmdPidFile", "AuthInfo")) for line in lines)
