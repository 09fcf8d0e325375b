"""Paths of what these tests take from elsewhere: scripted agent, driver of the cluster, build script."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "client"), str(ROOT / "tests" / "cluster"), str(ROOT / "packaging")]
