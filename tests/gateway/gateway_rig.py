"""Names that the gateway's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cadenza.slurm_plugin.gateway.source_gateway import SlurmGateway

HERE = Path(__file__).parent
RECORDING = HERE / "data" / "slurm-26.05.jsonl"
"""Four answers of a two-host, two-lane cluster: as submitted; after a suspend, a requeue and a drain; when the
requeued job is pending; after it was placed elsewhere and the lane was opened."""
MakeGateway = Callable[..., SlurmGateway]
BOTH = HERE / "data" / "both-26.05"
"""One moment of a cluster by pyslurm and as Slurm's commands print it: an array, held, suspended, requeued and failed
jobs, one on two nodes, one that ends, all forms of GPU requests, names and a comment that are not UTF-8, drained nodes,
a reservation, constraints and excluded nodes.
Of Slurm's JSON the cores of each job (``job_resources``) are left out."""
