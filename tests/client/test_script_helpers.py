"""Helpers for scripts: the batch and the GPUs of a job that may be resized, and results for a sweep."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import pytest

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.script_helpers import BATCH_ENV, batch
from cadenza.sidecar.client.session.job_session import Session


def ranks(size: int, **more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(size), **more}


@pytest.mark.parametrize(("size", "mine"), [(1, 64), (2, 32), (4, 16)])
def test_the_whole_batch_stays_unless_chosen_otherwise(size: int, mine: int) -> None:
    assert batch(64, 1, ranks(size)) == batch(64, 1, ranks(size, **{BATCH_ENV: "global"})) == mine
    assert batch(64, 4, ranks(size)) == mine, "with how many GPUs it was meant changes nothing"
    assert batch(64, 1, ranks(size, **{BATCH_ENV: "per-gpu"})) == 64
    assert batch(64, 4, ranks(size, **{BATCH_ENV: "per-gpu"})) == 16


def test_a_batch_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(UsageError, match="batch of 64 cannot be split evenly over 3 GPUs"):
        batch(64, 1, ranks(3))
    with pytest.raises(UsageError, match="over 0 GPUs"):
        batch(64, 0, ranks(1, **{BATCH_ENV: "per-gpu"}))
    with pytest.raises(UsageError, match="CADENZA_BATCH must be global or per-gpu, not 'both'"):
        batch(64, 1, ranks(1, **{BATCH_ENV: "both"}))


def test_it_takes_the_process_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(BATCH_ENV, raising=False)
    assert client.batch(64) == 32


def test_gpus_are_those_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Session().gpus == 0
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,2-3", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Session().gpus == 6


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


def test_a_report_that_cannot_be_written_is_warned_of_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CADENZA_SWEEP_REPORT", str(path / "not" / "there"))
    with caplog.at_level(logging.WARNING, "cadenza.client"):
        client.report(0.5, 1)
        client.report(0.5, 2)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text
