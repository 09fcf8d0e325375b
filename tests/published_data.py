"""Where the published workloads are: the folder that CADENZA_DATA names, else ``shared/data`` beside the project."""

from __future__ import annotations

import os
from pathlib import Path

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"


def published(name: str) -> Path | None:
    """Return a published file's path, or None where it is not."""
    path = Path(os.environ.get("CADENZA_DATA", BESIDE)) / name
    return path if path.is_file() else None
