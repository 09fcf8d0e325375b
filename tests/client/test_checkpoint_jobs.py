"""Jobs that are killed and restored train as if nothing had happened: bit for bit, and sample for sample."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoint_jobs
import pytest
from checkpoint_jobs import GLOBAL_BATCH, KILLED_AT, SAMPLES, SAVE_EVERY, STEPS

pytestmark = pytest.mark.slow

SAVED_AT = KILLED_AT - KILLED_AT % SAVE_EVERY


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs' records."""
    folder = tmp_path_factory.mktemp("jobs")
    subprocess.run([sys.executable, checkpoint_jobs.__file__, str(folder)], check=True, timeout=200)
    codes = json.loads((folder / "codes.json").read_text())
    assert all(set(found) == {-9 if name.endswith("killed") else 0} for name, found in codes.items()), codes
    return folder


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_a_killed_job_goes_on_bit_for_bit(jobs: Path, name: str) -> None:
    alone, killed, resumed = (lines(jobs / f"{name}.{run}") for run in ("alone", "killed", "resumed"))
    assert len(alone) == STEPS + 1
    assert killed == alone[:KILLED_AT]
    assert resumed == alone[SAVED_AT:]


def test_two_ranks_go_on_bit_for_bit(jobs: Path) -> None:
    for rank in range(2):
        assert lines(jobs / f"two.resumed.{rank}") == lines(jobs / f"two.alone.{rank}")[SAVED_AT:]


def global_batches(*ranks: list[dict[str, Any]]) -> list[list[int]]:
    """Return the samples of each step, over all ranks in the order of the epoch."""
    steps = [[line["samples"] for line in steps] for steps in zip(*ranks, strict=True) if "step" in steps[0]]
    return [[sample for turn in zip(*parts, strict=True) for sample in turn] for parts in steps]


def test_one_rank_takes_the_samples_that_two_would_have(jobs: Path) -> None:
    alone = global_batches(*(lines(jobs / f"two.alone.{rank}") for rank in range(2)))
    shrunk = global_batches(lines(jobs / "two.shrunk"))
    assert shrunk == alone[SAVED_AT:]
    per_epoch = SAMPLES // GLOBAL_BATCH
    for start in range(0, STEPS - per_epoch + 1, per_epoch):
        epoch = (alone[:SAVED_AT] + shrunk)[start : start + per_epoch]
        assert Counter(sample for batch in epoch for sample in batch) == Counter(range(SAMPLES))


def test_one_rank_computes_what_two_did(jobs: Path) -> None:
    """The mean over two ranks' means is the mean over the batch, up to rounding."""
    ranks = [lines(jobs / f"two.alone.{rank}") for rank in range(2)]
    together = [(a["loss"] + b["loss"]) / 2 for a, b in zip(*ranks, strict=True) if "loss" in a]
    assert [line["loss"] for line in lines(jobs / "two.shrunk")[:-1]] == pytest.approx(together[SAVED_AT:], rel=1e-5)


def test_two_ranks_take_over_from_one(jobs: Path) -> None:
    last = STEPS - STEPS % SAVE_EVERY
    grown = global_batches(*(lines(jobs / f"two.grown.{rank}") for rank in range(2)))
    assert grown == global_batches(lines(jobs / "two.shrunk"))[last - SAVED_AT :]


def test_two_checkpoints_are_kept(jobs: Path) -> None:
    names = {path.name for path in (jobs / "mlp.checkpoints").glob("step-*")}
    assert names == {"step-00000016", "step-00000020"}


def test_ranks_meet_at_a_call_or_the_missing_one_is_named_to_both(tmp_path: Path) -> None:
    script = Path(__file__).with_name("barrier_ranks.py")
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=200)
    first, second = (json.loads((tmp_path / f"told.{rank}").read_text()) for rank in range(2))
    assert first == second
    collective = "it is a collective call, which all ranks must make"
    assert first[0] == "met"
    assert first[1].startswith(f"rank 1 has not called save() within 1 s: {collective}; where one rank does something")
    assert collective in first[2]
    assert "save()" in first[2]
    assert "restore()" in first[2]
    assert first[3] == "goes on"
