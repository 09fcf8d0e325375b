"""Profile files for tests: a job that CPUs make faster, and one that needs none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HUNGRY = {
    "schema": "cadenza.profile/1",
    "model": "resnet",
    "gpu": "a100",
    "reference": {"gpus": 4, "cpus": 16, "memory_gb": 64},
    "iteration_s": 0.5,
    "cpus_per_gpu": [1, 2, 4, 8],
    "memory_gb_per_gpu": [4, 16],
    "throughput": [[0.25, 0.25], [0.5, 0.5], [1.0, 1.0], [2.0, 2.0]],
}
"""Twice as fast with 8 CPUs as with the 4 of its proportional share."""
SATED = {**HUNGRY, "model": "gnmt", "throughput": [[0.5, 0.5], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]}
"""No faster with more than 2 CPUs."""


def write_profile(folder: Path, name: str = "resnet.json", base: dict[str, Any] = HUNGRY, **changes: Any) -> Path:
    """Write one profile; ``changes`` to its keys, None takes one away."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    values = {key: value for key, value in {**base, **changes}.items() if value is not None}
    path.write_text(json.dumps(values), encoding="utf-8")
    return path
