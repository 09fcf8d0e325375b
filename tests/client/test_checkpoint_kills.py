"""Processes killed at random points of a save: no restore is wrong, and none older than the last complete save."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import checkpoint_kills
import pytest


@pytest.mark.slow
def test_kills_at_random_points_of_a_save_lose_nothing_that_was_complete(measured: Callable[[str], None]) -> None:
    command = [sys.executable, checkpoint_kills.__file__, "--kills", "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["kills"], found["wrong"], found["older"], found["not_begun"]) == (20, 0, 0, 0)
    assert found["in a save"] > 0
    measured(done.stdout.strip())
