"""Sharded state restores on the same and on another number of ranks, and ranks agree on every failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_shards
import pytest
from checkpoint_shards import SAVED_AT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All jobs' records."""
    folder = tmp_path_factory.mktemp("shards")
    subprocess.run([sys.executable, checkpoint_shards.__file__, str(folder)], check=True, timeout=200)
    return folder


def told(jobs: Path, name: str, rank: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((jobs / f"{name}.{rank}").read_text())
    return found


@pytest.mark.parametrize(("name", "before"), [("two", "saved"), ("two-background", "background")])
def test_as_many_ranks_go_on_bit_for_bit(jobs: Path, name: str, before: str) -> None:
    for rank in range(2):
        first = told(jobs, before, rank)
        expected = {"step": SAVED_AT, "after": first["after"], "average": first["average"]}
        assert told(jobs, name, rank) == expected


@pytest.mark.parametrize(("name", "before"), [("three", "saved"), ("one", "saved"), ("from-plain", "alone")])
def test_another_number_of_ranks_goes_on(jobs: Path, name: str, before: str) -> None:
    first, second = told(jobs, before), told(jobs, name)
    assert second["step"] == SAVED_AT
    assert second["after"] == pytest.approx(first["after"], rel=1e-4)
    assert second["average"] == [pytest.approx(row, rel=1e-4) for row in first["average"]]


def test_the_index_is_no_pickle_and_all_files_are_summed(jobs: Path) -> None:
    folder = jobs / "sharded" / "step-00000003"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"complete.json"}
    assert files == set(json.loads((folder / "complete.json").read_text())["files"])
    assert "sharded/index.json" in files
    assert not any(name.endswith(".metadata") for name in files)


def test_what_fails_on_one_rank_fails_on_both(jobs: Path) -> None:
    zero, one = (told(jobs, "failing", rank) for rank in range(2))
    assert [kind for kind, _ in one["messages"]] == ["UsageError", "UsageError", "UsageError", "MismatchError"]
    assert [kind for kind, _ in zero["messages"]] == ["CheckpointError", "UsageError", "UsageError", "CheckpointError"]
    assert "own['odd'].state.set is a set" in one["messages"][0][1]
    assert zero["messages"][0][1] == "rank 1: " + one["messages"][0][1]
    assert "rank 1 keeps state of other names or shapes" in zero["messages"][1][1]
    assert "own['average']: the checkpoint has shape [7, 4]" in zero["messages"][3][1]
    assert "own['values'] is a sharded tensor inside other values" in zero["messages"][2][1]
    assert not zero["left"]
