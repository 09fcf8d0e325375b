"""client.report: a line in the sweep's file, from rank 0 only, and never an exception."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from cadenza.sidecar import client


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CADENZA_SWEEP_REPORT", str(tmp_path / "7.jsonl"))
    return tmp_path / "7.jsonl"


def test_results_are_lines_with_their_step_and_time(path: Path) -> None:
    before = time.time()
    client.report(0.5, step=10)
    client.report(float("nan"), 20)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["step"], first["value"]) == (10, 0.5)
    assert before <= first["time_s"] <= time.time()
    assert second["value"] != second["value"]


def test_the_first_rank_speaks_for_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    client.report(0.5)
    assert not path.exists()
    monkeypatch.setenv("RANK", "0")
    client.report(0.5)
    assert json.loads(path.read_text())["step"] == 0


def test_outside_a_sweep_nothing_happens(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CADENZA_SWEEP_REPORT")
    client.report(0.5, 1)
    assert not path.exists()


def test_what_cannot_be_written_is_said_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CADENZA_SWEEP_REPORT", str(path / "not" / "there"))
    with caplog.at_level(logging.WARNING, "cadenza.client"):
        client.report(0.5, 1)
        client.report(0.5, 2)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
