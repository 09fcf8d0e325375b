"""Killed while saving, full disk, damaged files: the checkpoint before restores, and the error names file and cause."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import checkpoint_faults
import pytest
import torch
from torch import nn

from cadenza.sidecar.client.checkpoints import DamagedError, VersionError, checkpoint
from cadenza.sidecar.client.errors import UsageError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Files left by processes that were killed or filled the disk."""
    folder = tmp_path_factory.mktemp("faults")
    subprocess.run([sys.executable, checkpoint_faults.__file__, str(folder)], check=True, timeout=200)
    told: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return told


def test_a_kill_at_any_point_leaves_the_last_or_the_new_one(found: dict[str, Any]) -> None:
    steps = [one["restored"] for one in found["killed"]]
    assert len(steps) > 10
    assert steps == sorted(steps)
    assert set(steps) == {2, 3}
    for one in found["killed"]:
        assert one["then"] == 4
        assert one["names"] == [f"step-0000000{one['restored']}", "step-00000004"]


def test_a_kill_in_the_middle_of_the_write(found: dict[str, Any]) -> None:
    one = found["write"]
    assert one["codes"] == [-9]
    assert one["left"] > 0
    assert one["restored"] == 1


def test_a_full_disk_is_named_and_the_last_one_stays(found: dict[str, Any]) -> None:
    full = found["full"]
    foreground, background, closed = full["messages"]
    cause = "No space left on device" if full["mounted"] else "File too large"
    for step, message in ((2, foreground), (3, background)):
        assert message.startswith(f"step {step} is not saved, earlier ones are untouched: ")
        assert f"step-0000000{step}.tmp/shared.pt: {cause}" in message
    assert closed == ""  # the error was told once, and the save that told it did not start another
    assert full["names"] == ["step-00000001"]
    assert full["restored"] == 1


def saved(place: Path, *steps: int) -> nn.Module:
    """Save a model that contains the step, for each step."""
    model = nn.Linear(64, 2)
    keeper = checkpoint(place, model=model)
    for step in steps:
        nn.init.constant_(model.weight, float(step))
        keeper.save(step)
    return model


def names(place: Path) -> list[str]:
    """Return the names of what is there, but for the lock."""
    return sorted(path.name for path in place.iterdir() if path.name != ".lock")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("harm", [truncate, flip, Path.unlink])
@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.json", "complete.json"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, harm: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = saved(tmp_path, 1, 2)
    harm(tmp_path / "step-00000002" / name)
    keeper = checkpoint(tmp_path, model=model)
    with caplog.at_level(logging.WARNING):
        assert keeper.restore() == 1
    assert bool((model.weight == 1).all())
    assert [(one.path.name, one.step) for one in keeper.skipped] == [("step-00000002", 2)]
    assert name in keeper.skipped[0].reason
    assert keeper.skipped[0].reason in caplog.text
    keeper.save(2)  # the same step again; the damaged one is then removed
    assert names(tmp_path) == ["step-00000001", "step-00000002.2"]
    assert keeper.restore() == 2


def test_a_damaged_later_one_does_not_displace_intact_ones(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 5)
    flip(tmp_path / "step-00000005" / "shared.pt")
    keeper = checkpoint(tmp_path, model=model)
    assert keeper.restore() == 1
    keeper.save(2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_all_damaged_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    model = nn.Linear(64, 2)
    assert checkpoint(tmp_path / "nothing", model=model).restore() is None
    model = saved(tmp_path, 1, 2)
    for step in (1, 2):
        truncate(tmp_path / f"step-0000000{step}" / "shared.pt")
    with pytest.raises(DamagedError, match=r"step-00000002: shared.pt has \d+ bytes instead of .*step-00000001"):
        checkpoint(tmp_path, model=model).restore()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_only_an_unfinished_one_is_as_none(tmp_path: Path) -> None:
    model = saved(tmp_path, 1)
    (tmp_path / "step-00000001" / "complete.json").unlink()
    keeper = checkpoint(tmp_path, model=model)
    assert keeper.restore() is None
    assert "never finished" in keeper.skipped[0].reason


def test_a_save_that_was_cut_off_is_told_with_what_was_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job killed at the end of KillWait leaves what it has written by then."""
    model = nn.Linear(1024, 1024)
    checkpoint(tmp_path, model=model).save(1)
    whole = sum(path.stat().st_size for path in (tmp_path / "step-00000001").iterdir() if path.name != "complete.json")
    cut = tmp_path / "step-00000002.tmp"
    cut.mkdir()
    for name, size, moment in (("rank-00000.json", 1, 100.0), ("shared.pt", whole // 4, 103.0)):
        (cut / name).write_bytes(b"x" * size)
        os.utime(cut / name, (moment, moment))
    keeper = checkpoint(tmp_path, model=model)
    assert keeper.restore() == 1
    (text,) = [record.getMessage() for record in caplog.records if "step-00000002.tmp" in record.getMessage()]
    found = re.search(r"after (\S+) MiB in 3.0 s; missing were (\S+) MiB, (\S+) s at this speed", text)
    assert found, text
    written, missing, seconds = map(float, found.groups())
    assert written + missing == pytest.approx(whole / 2**20, abs=0.11)
    assert seconds == pytest.approx(3.0 * 3, rel=0.02)
    keeper.save(2)
    assert not cut.exists()


def test_times_of_files_mean_nothing(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 2)
    for path, when in ((tmp_path / "step-00000001", 4e9), (tmp_path / "step-00000002", 0)):
        for file in (*path.iterdir(), path):
            os.utime(file, (when, when))
    keeper = checkpoint(tmp_path, model=model)
    assert keeper.restore() == 2
    keeper.save(3)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_step_before_the_newest_is_refused(tmp_path: Path) -> None:
    model = saved(tmp_path, 7)
    with pytest.raises(UsageError, match="has step 7, so step 3 cannot be saved"):
        checkpoint(tmp_path, model=model).save(3)
    assert checkpoint(tmp_path, model=model).restore() == 7


def test_a_later_format_is_an_error_and_not_passed_over(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 2)
    marker = tmp_path / "step-00000002" / "complete.json"
    told = json.loads(marker.read_text())
    told.pop("crc32")
    told["schema"] = "cadenza.checkpoint/2"
    told["crc32"] = zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
    marker.write_text(json.dumps(told))
    with pytest.raises(VersionError, match="upgrade cadenza"):
        checkpoint(tmp_path, model=model).restore()


class Trap:
    """An attacker's object in a pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/cadenza-was-here",)


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    model = saved(tmp_path, 1, 2)
    folder = tmp_path / "step-00000002"
    torch.save({"parts": Trap()}, folder / "shared.pt")
    marker = folder / "complete.json"
    told = json.loads(marker.read_text())
    told.pop("crc32")
    data = (folder / "shared.pt").read_bytes()
    told["files"]["shared.pt"] = {"bytes": len(data), "crc32": zlib.crc32(data)}
    told["crc32"] = zlib.crc32(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
    marker.write_text(json.dumps(told))
    keeper = checkpoint(tmp_path, model=model)
    assert keeper.restore() == 1
    assert "UnpicklingError" in keeper.skipped[0].reason
    assert not Path("/tmp/cadenza-was-here").exists()
