"""The request of a job for another size; the shapes are those of Slurm 26.05's scontrol."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.slurm_plugin.gateway.request_sizes import BadRequest, changes

SHOWN = (
    "JobId=1 NumNodes=1-1 NumCPUs=2 NumTasks=1 CPUs/Task=2 ReqTRES=cpu=2,mem=1500M,node=1,billing=2,gres/gpu=2 "
    "AllocTRES=(null) MinCPUsNode=2 MinMemoryNode=1500M Features=lane0 {} TresPerTask=cpu=2"
)


def share(node: str, gpus: int) -> dict[str, Any]:
    return {"node": node, "gpus": gpus, "cpus": 2 * gpus, "memory_mb": 1500 * gpus}


def test_a_request_by_node_grows_on_one_node() -> None:
    assert changes(SHOWN.format("TresPerNode=gres/gpu:2"), [share("node2", 4)]) == [
        "NumNodes=1-1", "NumTasks=1", "NumCPUs=8", "MinCPUsNode=8", "CPUsPerTask=8", "MinMemoryNode=6000",
        "ReqNodeList=node2", "TresPerNode=gres/gpu:4",
    ]  # fmt: skip


def test_a_request_by_job_spreads_over_two_nodes_with_a_task_each() -> None:
    found = changes(SHOWN.format("TresPerJob=gres/gpu:2"), [share("n1", 2), share("n2", 2)])
    assert {"NumNodes=2-2", "NumTasks=2", "NumCPUs=8", "TresPerJob=gres/gpu:4", "ReqNodeList=n1,n2"} <= set(found)


def test_one_task_a_gpu_stays_so() -> None:
    shown = SHOWN.format("TresPerJob=gres/gpu:2").replace("NumTasks=1", "NumTasks=2")
    assert {"NumTasks=1", "CPUsPerTask=2"} <= set(changes(shown, [share("n1", 1)]))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("NumTasks=1", "NumTasks=3", "3 tasks are neither one a node nor one a GPU"),
        ("TresPerTask=cpu=2", "TresPerTask=cpu=2,gres/gpu=1", "it asked for TresPerTask"),
    ],
)
def test_what_cannot_be_spread_is_refused(old: str, new: str, why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        changes(SHOWN.format("TresPerNode=gres/gpu:2").replace(old, new), [share("n1", 1)])


def test_nodes_get_the_same() -> None:
    with pytest.raises(BadRequest, match="would not get the same"):
        changes(SHOWN.format("TresPerNode=gres/gpu:2"), [share("n1", 1), share("n2", 2)])
