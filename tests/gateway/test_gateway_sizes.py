"""The request of a job for another size; the shapes are those of Slurm 26.05's scontrol."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from cadenza.slurm_plugin.gateway.verbs import BadRequest, shown_job, size_changes


def shown(**fields: Any) -> Mapping[str, Any]:
    """Return one job with two GPUs as ``scontrol show job --json=v0.0.42`` has it, in a text like Slurm's own."""
    job = {
        "job_id": 1, "name": "train", "comment": "", "node_count": number(1), "tasks": number(1),
        "tres_req_str": "cpu=2,mem=1500M,node=1,billing=2,gres/gpu=2", "tres_per_job": "",
        "tres_per_node": "gres/gpu:2", "tres_per_task": "cpu=2", "cpus_per_tres": "",
    }  # fmt: skip
    return shown_job(json.dumps({"jobs": [job | fields], "errors": []}), 1)


def number(value: int) -> dict[str, Any]:
    return {"set": True, "infinite": False, "number": value}


def share(node: str, gpus: int) -> dict[str, Any]:
    return {"node": node, "gpus": gpus, "cpus": 2 * gpus, "memory_mb": 1500 * gpus}


def test_a_request_by_node_grows_on_one_node() -> None:
    assert size_changes(shown(), [share("node2", 4)]) == [
        "NumNodes=1-1", "NumTasks=1", "NumCPUs=8", "MinCPUsNode=8", "CPUsPerTask=8", "MinMemoryNode=6000",
        "ReqNodeList=node2", "TresPerNode=gres/gpu:4",
    ]  # fmt: skip


def test_a_request_by_job_spreads_over_two_nodes_with_a_task_each() -> None:
    found = size_changes(shown(tres_per_job="gres/gpu:2"), [share("n1", 2), share("n2", 2)])
    assert {"NumNodes=2-2", "NumTasks=2", "NumCPUs=8", "TresPerJob=gres/gpu:4", "ReqNodeList=n1,n2"} <= set(found)


def test_one_task_a_gpu_stays_so() -> None:
    job = shown(tres_per_job="gres/gpu:2", tasks=number(2))
    assert {"NumTasks=1", "CPUsPerTask=2"} <= set(size_changes(job, [share("n1", 1)]))


@pytest.mark.parametrize(
    "text", ["NumTasks=9 TresPerJob=gres/gpu:9", "x TresPerTask=gres/gpu=1 CpusPerTres=gres/gpu:2"]
)
def test_no_name_or_comment_passes_for_a_field(text: str) -> None:
    usual = size_changes(shown(), [share("n1", 1)])
    assert size_changes(shown(name=text, comment=text), [share("n1", 1)]) == usual


@pytest.mark.parametrize("text", ["", "slurm_load_jobs error", '{"jobs": []}', '{"jobs": [{"job_id": 2}]}', "[" * 5000])
def test_a_job_that_is_not_shown_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="does not show job 1"):
        shown_job(text, 1)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"tasks": {"number": 3}}, "3 tasks are neither one a node nor one a GPU"),
        ({"tres_per_task": "cpu=2,gres/gpu=1"}, "it asked for --gpus-per-task"),
        ({"cpus_per_tres": "gres/gpu:2"}, "it asked for --cpus-per-gpu"),
    ],
)
def test_what_cannot_be_spread_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(BadRequest, match=why):
        size_changes(shown(**fields), [share("n1", 1)])


def test_nodes_get_the_same() -> None:
    with pytest.raises(BadRequest, match="would not get the same"):
        size_changes(shown(), [share("n1", 1), share("n2", 2)])
