"""Changes of a pending job's request for other numbers of GPUs and nodes (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class BadRequest(Exception):  # noqa: N818
    """The request itself is wrong."""


def changes(shown: str, shares: list[dict[str, Any]]) -> list[str]:
    """Return the arguments of ``scontrol update`` that give a job these shares; ``shown``: ``scontrol -o show job``.

    pyslurm cannot change NumNodes, MinCPUsNode and TresPerJob of a job. One task a node stays one task a node (as
    torchrun wants it), one task a GPU one a GPU; other jobs, and those with ``--gpus-per-task`` or ``--cpus-per-gpu``,
    are refused, because the spread of their tasks is not fields.
    """
    fields = dict(field.partition("=")[::2] for field in shown.split())
    if len({(share["gpus"], share["cpus"], share["memory_mb"]) for share in shares}) != 1:
        raise BadRequest("its nodes would not get the same, which Slurm cannot be asked for")
    for name in ("TresPerTask", "CpusPerTres"):
        if "gpu" in fields.get(name, ""):
            raise BadRequest(f"it asked for {name}={fields[name]}: its size cannot be changed")
    nodes, share = len(shares), shares[0]
    tasks = tasks_a_node(fields, share["gpus"])
    wanted = {
        "NumNodes": f"{nodes}-{nodes}", "NumTasks": nodes * tasks, "NumCPUs": nodes * share["cpus"],
        "MinCPUsNode": share["cpus"], "CPUsPerTask": max(1, share["cpus"] // tasks),
        "MinMemoryNode": share["memory_mb"], "ReqNodeList": ",".join(one["node"] for one in shares),
    }  # fmt: skip
    if fields.get("TresPerJob"):
        wanted["TresPerJob"] = f"gres/gpu:{nodes * share['gpus']}"
    else:
        wanted["TresPerNode"] = f"gres/gpu:{share['gpus']}"
    return [f"{name}={value}" for name, value in wanted.items()]


def tasks_a_node(fields: Mapping[str, str], gpus: int) -> int:
    """Return the tasks that each node gets with ``gpus`` GPUs; BadRequest when the job's tasks follow neither."""
    nodes, tasks = int(fields["NumNodes"].partition("-")[0]), int(fields["NumTasks"])
    if tasks == nodes:
        return 1
    counts = dict(item.partition("=")[::2] for item in (fields.get("ReqTRES") or "").split(","))
    if str(tasks) == counts.get("gres/gpu"):
        return gpus
    raise BadRequest(f"its {tasks} tasks are neither one a node nor one a GPU: its size cannot be changed")
