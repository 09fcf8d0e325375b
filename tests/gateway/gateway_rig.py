"""Names that the gateway's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from cadenza.slurm_plugin.gateway.pyslurm_gateway import SlurmGateway

HERE = Path(__file__).parent
RECORDING = HERE / "data" / "slurm-26.05.jsonl"
"""Four answers of a two-host, two-lane cluster: as submitted; after a suspend, a requeue and a drain; when the
requeued job is pending; after it was placed elsewhere and the lane was opened."""
MakeGateway = Callable[..., SlurmGateway]
