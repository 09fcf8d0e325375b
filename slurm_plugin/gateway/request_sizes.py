"""Changes of a pending job's request for other numbers of GPUs and nodes (no I/O)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class BadRequest(Exception):  # noqa: N818
    """The request itself is wrong."""


def shown_job(text: str, number: int) -> Mapping[str, Any]:
    """Return a job of the output of ``scontrol show job --json``; BadRequest when it is not there.

    Only JSON tells Slurm's fields from texts of users: in lines of ``name=value`` a job's name can hold any field.
    """
    try:
        jobs = json.loads(text)["jobs"]
        return next(job for job in jobs if job["job_id"] == number)
    except (ValueError, LookupError, TypeError, RecursionError, StopIteration):
        raise BadRequest(f"Slurm's JSON does not show job {number}") from None


def changes(shown: Mapping[str, Any], shares: list[dict[str, Any]]) -> list[str]:
    """Return the arguments of ``scontrol update`` that give a job these shares; ``shown``: see ``shown_job``.

    pyslurm cannot change NumNodes, MinCPUsNode and TresPerJob of a job. One task a node stays one task a node (as
    torchrun wants it), one task a GPU one a GPU; other jobs, and those with ``--gpus-per-task`` or ``--cpus-per-gpu``,
    are refused, because the spread of their tasks is not fields.
    """
    if len({(share["gpus"], share["cpus"], share["memory_mb"]) for share in shares}) != 1:
        raise BadRequest("its nodes would not get the same, which Slurm cannot be asked for")
    for name, option in (("tres_per_task", "--gpus-per-task"), ("cpus_per_tres", "--cpus-per-gpu")):
        if "gpu" in shown.get(name, ""):
            raise BadRequest(f"it asked for {option} ({shown[name]}): its size cannot be changed")
    nodes, share = len(shares), shares[0]
    tasks = tasks_a_node(shown, share["gpus"])
    wanted = {
        "NumNodes": f"{nodes}-{nodes}", "NumTasks": nodes * tasks, "NumCPUs": nodes * share["cpus"],
        "MinCPUsNode": share["cpus"], "CPUsPerTask": max(1, share["cpus"] // tasks),
        "MinMemoryNode": share["memory_mb"], "ReqNodeList": ",".join(one["node"] for one in shares),
    }  # fmt: skip
    if shown.get("tres_per_job"):
        wanted["TresPerJob"] = f"gres/gpu:{nodes * share['gpus']}"
    else:
        wanted["TresPerNode"] = f"gres/gpu:{share['gpus']}"
    return [f"{name}={value}" for name, value in wanted.items()]


def tasks_a_node(shown: Mapping[str, Any], gpus: int) -> int:
    """Return the tasks that each node gets with ``gpus`` GPUs; BadRequest when the job's tasks follow neither."""
    nodes, tasks = int(shown["node_count"]["number"]), int(shown["tasks"]["number"])
    if tasks == nodes:
        return 1
    counts = dict(item.partition("=")[::2] for item in shown.get("tres_req_str", "").split(","))
    if str(tasks) == counts.get("gres/gpu"):
        return gpus
    raise BadRequest(f"its {tasks} tasks are neither one a node nor one a GPU: its size cannot be changed")
