"""The list of jobs that a site's scripts ask for, over real processes."""

from __future__ import annotations

import os

import msgspec
import pytest
from click.testing import CliRunner
from test_agent_book import Steps, handover, steps, written

from cadenza.sidecar.agent.inventory import JobHere, inventory, node_of
from cadenza.sidecar.agent.ipc.slurm_steps import Step
from cadenza.sidecar.agent.main import main

__all__ = ["steps"]  # the fixture


def test_each_job_of_each_lane_has_a_line(steps: Steps) -> None:
    holder, second, plain = steps.run(5), steps.run(29, "n1-l1"), steps.run(7)
    leases = (written(5, "held", holder), written(29, "yielded", second, gpus=(0, 1)), written(8, "held"))
    found = inventory(steps.found, (handover(5), handover(29, (0, 1), node="n1-l1")), leases)
    uid = os.getuid()
    assert found == (
        JobHere(5, "n1", uid, (0,), "held", (holder,)),
        JobHere(7, "n1", uid, (), "", (plain,)),
        JobHere(29, "n1-l1", uid, (0, 1), "yielded", (second,)),
    )
    assert [str(job) for job in found][1:] == [f"7 n1 {uid} - - {plain}", f"29 n1-l1 {uid} 0,1 yielded {second}"]
    assert msgspec.json.decode(msgspec.json.encode(found), type=tuple[JobHere, ...]) == found


def test_steps_of_one_job_are_one_line_and_a_lease_of_another_lane_is_not_its_own(steps: Steps) -> None:
    pids = steps.run(5), steps.run(5)
    lease = written(5, "held")
    lease.node = "n1-l1"
    (found,) = inventory(steps.found, (handover(5, node="n1-l1"),), (lease,))
    assert (found.pids, found.gpus, found.lease) == (tuple(sorted(pids)), (), "")


@pytest.mark.parametrize(
    ("group", "node"),
    [
        ("freezer:slurm_node1-l1/uid_2001/job_5", "node1-l1"),
        (":system.slice/node1-l1_slurmstepd.scope/job_5", "node1-l1"),
        (":system.slice/slurmstepd.scope/job_5", ""),
        ("", ""),
    ],
)
def test_the_group_names_the_node_where_the_environment_does_not(group: str, node: str) -> None:
    assert node_of(Step(5, "", 1, 1, group)) == node
    assert node_of(Step(5, "n1", 1, 1, group)) == "n1"


def test_an_empty_list_is_never_a_failure(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    (tmp_path / "cadenza.toml").touch()
    result = CliRunner().invoke(main, ["--jobs", "--config", str(tmp_path / "cadenza.toml")])
    assert result.exit_code == 3
    assert "only root sees all jobs" in result.output
