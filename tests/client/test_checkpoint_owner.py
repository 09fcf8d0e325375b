"""A directory belongs to one job and one live writer, wherever it was named from; its errors have its path."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_jobs import fork, wait
from torch import nn

from cadenza.sidecar import client
from cadenza.sidecar.client.checkpoints import (
    Checkpoint,
    CheckpointError,
    InUseError,
    OtherJobError,
    SaveError,
    checkpoint,
    files,
    ownership,
)

JOB = {"SLURM_JOB_ID": "12", "SLURM_JOB_USER": "ann"}
TASK = {"SLURM_JOB_ID": "14", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_USER": "ann"}


@pytest.fixture(autouse=True)
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No Slurm job, and no session at the end."""
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT", "CADENZA_ADOPT"):
        monkeypatch.delenv(name, raising=False)
    yield
    client.detach()


def model(value: float = 0.0) -> nn.Module:
    made = nn.Linear(2, 2)
    nn.init.constant_(made.weight, value)
    return made


def saved_by(place: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, step: int = 1) -> None:
    """Save a step as another job."""
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with checkpoint(place, model=model(7.0)) as keeper:
            keeper.save(step)


def become(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


def test_the_marker_names_the_job_and_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by(tmp_path, TASK, monkeypatch)
    told = json.loads((tmp_path / "step-00000001" / "complete.json").read_text())
    assert told["owner"] == {"job": "12_3", "cluster": "", "user": "ann", "command": ownership.owner_here().command}
    assert (told["unit"], told["ordered"], told["boundaries"]) == ("", False, 0)


@pytest.mark.parametrize(
    ("before", "now"),
    [(JOB, {**JOB, "SLURM_RESTART_COUNT": "2"}), (TASK, {**TASK, "SLURM_JOB_ID": "99"}), (JOB, {}), ({}, JOB)],
    ids=["a requeue", "an array's task", "outside Slurm now", "outside Slurm before"],
)
def test_the_same_job_restores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str], now: dict[str, str]
) -> None:
    saved_by(tmp_path, before, monkeypatch)
    become(now, monkeypatch)
    assert checkpoint(tmp_path, model=model()).restore() == 1


@pytest.mark.parametrize("other", [{"SLURM_JOB_ID": "13"}, TASK, {**TASK, "SLURM_ARRAY_TASK_ID": "4"}])
def test_another_jobs_checkpoint_is_an_error_that_says_how_to_adopt_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    saved_by(tmp_path, JOB if "4" not in other.get("SLURM_ARRAY_TASK_ID", "") else TASK, monkeypatch)
    become(other, monkeypatch)
    mine = model()
    keeper = checkpoint(tmp_path, model=mine)
    with pytest.raises(
        OtherJobError, match=r"is of job 12(_3)? of ann \(the same command\).*adopt=True.*CADENZA_ADOPT=1"
    ):
        keeper.restore()
    assert bool((mine.weight == 0).all())
    with pytest.raises(OtherJobError):
        keeper.save(2)
    assert (tmp_path / "step-00000001" / "complete.json").exists()
    assert keeper.restore(adopt=True) == 1
    keeper.save(2)
    assert keeper.restore() == 2


def test_the_environment_adopts_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_by(tmp_path, JOB, monkeypatch)
    become({"SLURM_JOB_ID": "13", "CADENZA_ADOPT": "1"}, monkeypatch)
    keeper = checkpoint(tmp_path, model=model())
    assert keeper.restore() == 1
    keeper.save(2)


def test_a_relative_directory_is_the_one_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keeper = checkpoint("kept", model=model())
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    keeper.save(1)
    assert (tmp_path / "kept" / "step-00000001").exists()
    assert keeper.restore() == 1


# --- one writer ---------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Another live process that saves, or has restored, in the directory."""
    (tmp_path / "kept").mkdir()

    def write(has_it: Connection) -> None:
        os.environ.update(JOB)
        keeper = checkpoint(tmp_path / "kept", model=model())
        if request.param == "restore":
            keeper.restore()
        else:
            keeper.save(1)
        has_it.send(True)
        signal.pause()

    here, there = Pipe()
    process = get_context("fork").Process(target=write, args=(there,))
    process.start()
    assert here.poll(30)
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize("writer", ["save"], indirect=True)
def test_a_second_writer_is_kept_out_until_the_first_is_dead(
    tmp_path: Path, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "OTHER_WAIT_S", 0.1)
    monkeypatch.setattr(ownership, "POLL_S", 0.05)
    keeper = checkpoint(tmp_path / "kept", model=model())
    text = rf"kept: process {writer.pid} on \S+ \(job 12 of ann\) saves its checkpoints there"
    with pytest.raises(InUseError, match=text):
        keeper.restore()
    with pytest.raises(InUseError, match=text):
        keeper.save(2)
    writer.kill()
    writer.join()
    keeper.save(2)
    assert keeper.restore() == 2


@pytest.mark.parametrize("writer", ["restore"], indirect=True)
def test_an_earlier_start_of_the_job_is_waited_for(
    tmp_path: Path, writer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ownership, "OTHER_WAIT_S", 0.0)
    monkeypatch.setattr(ownership, "POLL_S", 0.02)
    become(JOB, monkeypatch)
    keeper = checkpoint(tmp_path / "kept", model=model())
    ending = threading.Timer(0.2, writer.kill)
    ending.start()
    keeper.save(1)
    assert f"waiting up to 120 s for process {writer.pid}" in caplog.text


def test_the_last_keeper_of_a_process_has_the_directory(tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path, model=model()), checkpoint(tmp_path, own={"other": torch.ones(1)})
    first.save(1)
    second.save(2)
    for again in (lambda: first.save(3), first.restore):
        with pytest.raises(InUseError, match="a later keeper of this process has taken over"):
            again()
    assert second.restore() == 2


def test_a_forked_child_has_no_part_in_its_parents_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "OTHER_WAIT_S", 0.0)
    keeper = checkpoint(tmp_path, model=model())
    keeper.save(1)

    def child() -> None:
        with pytest.raises(InUseError):
            keeper.save(2)

    assert wait(fork(child)) == [0]
    keeper.save(2)
    keeper.close()
    other = checkpoint(tmp_path, model=model())
    assert wait(fork(lambda: other.save(3))) == [0]


def test_a_file_system_without_locks_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    keeper = checkpoint(tmp_path, model=model())
    with caplog.at_level(logging.WARNING):
        keeper.save(1)
        keeper.save(2)
    assert caplog.text.count("its file system has no locks (No locks available)") == 1


# --- errors of file systems ---------------------------------------------------------------------------------


def test_a_directory_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        keeper = checkpoint(place, model=model())
        with pytest.raises(CheckpointError, match=f"{place}: Not a directory"):
            keeper.restore()
        with pytest.raises(SaveError, match=r"step 1 is not saved.*/file.*(Not a directory|File exists)"):
            keeper.save(1)


@pytest.mark.parametrize("code", [errno.EDQUOT, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_what_the_file_system_refuses_is_said_with_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    keeper = checkpoint(tmp_path, model=model())
    keeper.save(1)
    original = getattr(os, call)

    def refuse(path: Any, *arguments: Any, **options: Any) -> Any:
        if call == "mkdir" and not str(path).endswith(".tmp"):
            return original(path, *arguments, **options)
        raise OSError(code, os.strerror(code), *([] if isinstance(path, int) else [str(path)]))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(SaveError, match=rf"step 2 is not saved.*{tmp_path}/\S+: {os.strerror(code)}"):
            keeper.save(2)
    assert keeper.restore() == 1
    keeper.save(2)


def complete(keeper: Checkpoint, step: int) -> None:
    """Save, and wait until it is complete."""
    keeper.save(step)
    keeper.wait()


def test_a_stalled_save_is_given_up_with_the_path_and_the_next_one_waits_for_its_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STALL_S", 0.3)
    monkeypatch.setattr(files, "STALL_FACTOR", 0.0)
    goes_on, sync = threading.Event(), os.fsync
    for background in (False, True):
        place = tmp_path / str(background)
        keeper = checkpoint(place, model=model(1.0), background=background)
        keeper.save(1)
        keeper.wait()
        goes_on.clear()
        monkeypatch.setattr(os, "fsync", lambda handle: (goes_on.wait(), sync(handle)))
        for _ in range(2):
            with pytest.raises(SaveError, match=rf"{place}\S*: the file system has not answered for 0 s"):
                complete(keeper, 2)
        goes_on.set()
        complete(keeper, 3)
        assert keeper.restore() == 3
        assert sorted(path.name for path in place.glob("step-*")) == ["step-00000001", "step-00000003"]
        monkeypatch.setattr(os, "fsync", sync)


def test_a_slow_save_that_moves_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "STALL_S", 0.2)
    monkeypatch.setattr(files, "STALL_FACTOR", 0.0)
    patience, pause = files.Patience(), threading.Event()

    def slow() -> str:
        for _ in range(8):
            pause.wait(0.06)
            files.moved()
        return "done"

    assert patience.run(tmp_path, slow) == "done"
    patience.took(30.0)
    monkeypatch.setattr(files, "STALL_FACTOR", 4.0)
    assert patience.limit_s == 120.0
