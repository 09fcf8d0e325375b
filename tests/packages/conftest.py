"""Paths of what these tests take from elsewhere: the scripted agent of the client's tests, and the build script."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "tests" / "client"), str(ROOT / "packaging")]
