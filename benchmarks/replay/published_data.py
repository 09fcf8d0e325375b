"""Published workloads: in the folder that CADENZA_DATA names, else in ``shared/data`` next to the project."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "data"


def published(name: str) -> Path | None:
    """Return a published file's path, or None where it is not."""
    path = Path(os.environ.get("CADENZA_DATA", DEFAULT)) / name
    return path if path.is_file() else None


def needed(name: str) -> Path:
    """Return a published file's path, or end with exit code 3, naming it."""
    path = published(name)
    if path is None:
        print(f"{name} is not here: set CADENZA_DATA to the folder that has it", file=sys.stderr)
        raise SystemExit(3)
    return path
