"""The made-up site of scale.py: the service reads it as Slurm and acts on it, and its record is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import scale

from cadenza.sidecar import clock
from cadenza.slurm_plugin.service.store.reader import StoreReader


def test_rounds_of_a_made_up_site_are_decided_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "now", clock.now)  # put back at the end: the site has a clock of its own
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = scale.measure(20, 200, 2, tmp_path)
    assert found["actions"].keys() & {"SetFactor", "Yield", "MakeWay"}
    assert scale.figures(found)["cpu_p99"] > 0.0
    with StoreReader(tmp_path / "cadenza.db") as reader:
        rounds = [reader.round(number) for number in range(1, 4)]
    assert all(one is not None and len(one.snapshot.jobs) >= 150 for one in rounds)
