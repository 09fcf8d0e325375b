"""Each change of mutants.py makes a test of the engine fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mutants
import pytest

pytestmark = pytest.mark.slow


def test_each_change_of_the_engine_is_noticed() -> None:
    command = [sys.executable, str(Path(mutants.__file__))]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    assert "NOT NOTICED" not in done.stdout, done.stdout
    assert (done.returncode, len(done.stdout.splitlines())) == (0, len(mutants.MUTANTS)), done.stdout
