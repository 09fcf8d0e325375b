"""Each change of addresses_mutants.py is noticed by the driving program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import addresses_mutants
import pytest
from addresses_bench import SOURCE, Bench

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", addresses_mutants.MUTANTS)
def test_a_change_is_noticed(bench: Bench, tmp_path: Path, name: str) -> None:
    source = tmp_path / "addresses.c"
    source.write_text(addresses_mutants.changed((SOURCE / "addresses.c").read_text(), name))
    program = bench.linked(f"mutant-{abs(hash(name))}", source, "-rdynamic", "-Wno-error")
    try:
        assert any(bench.run(program, words).returncode for words in ([], ["fuzz", "1", "500"]))
    except subprocess.TimeoutExpired:
        return
