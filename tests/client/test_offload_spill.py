"""State goes to a disk of the node when host memory is short: bit by bit, all of it or none, and never without room."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from client_peer import Peer, Script, Turns

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError, RestoreError
from cadenza.sidecar.client.offload import spill
from cadenza.sidecar.client.offload.host import memory_limits
from cadenza.sidecar.client.offload.spill import SpillFile
from cadenza.sidecar.client.offload.storages import Segment

SIZES = [1, 4095, 4096, 70_001, 300_000]


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    return [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in SIZES]


def segments(tensors: list[torch.Tensor]) -> list[Segment]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return [Segment(str(index), storage, storage.nbytes()) for index, storage in enumerate(storages)]


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Limit the size of this process's files: EFBIG stands for the ENOSPC of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job's memory limit that leaves nothing."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for name, value in {"current": 100, "max": 100}.items():
        (tmp_path / f"sys/fs/cgroup/memory.{name}").write_text(f"{value}\n")
    monkeypatch.setattr(memory_limits.refusal, "__defaults__", (tmp_path,))


def test_a_round_trip_changes_no_bit_and_leaves_no_file(
    tensors: list[torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "WINDOW_BYTES", 4096)
    monkeypatch.setattr(spill, "SYNC_BYTES", 100_000)
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    for _ in range(2):
        spilled = SpillFile(segments(tensors), str(tmp_path))
        spilled.offload()
        assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
        assert os.fstat(spilled._file.fileno()).st_size == sum(SIZES)
        assert list(tmp_path.iterdir()) == []
        spilled.restore()
        assert all(torch.equal(now, then) for now, then in zip(tensors, copies, strict=True))
        assert spilled._file.closed
    assert [tensor._version for tensor in tensors] == versions


def test_a_full_disk_is_found_before_anything_moves(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    with full_disk(100_000), pytest.raises(MoveError, match=r"no 0 MiB in .*: File too large"):
        SpillFile(segments(tensors), str(tmp_path))
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == SIZES


def test_a_write_that_fails_leaves_all_where_it_was(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    """A file system that gives allocated space to others."""
    spilled = SpillFile(segments(tensors), str(tmp_path))
    with full_disk(100_000), pytest.raises(MoveError, match="could not be written to disk: File too large"):
        spilled.offload()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == SIZES
    assert spilled._file.closed


def test_a_file_that_cannot_be_read_is_an_error_and_not_wrong_state(
    tensors: list[torch.Tensor], tmp_path: Path
) -> None:
    spilled = SpillFile(segments(tensors), str(tmp_path))
    spilled.offload()
    os.ftruncate(spilled._file.fileno(), 5000)
    with pytest.raises(RestoreError, match="too short"):
        spilled.restore()


def test_a_directory_that_cannot_take_it_is_named(tmp_path: Path) -> None:
    assert spill.refusal(str(tmp_path), 1, 8) is None
    assert spill.refusal(str(tmp_path / "none"), 1, 1).endswith("none: No such file or directory")
    assert f"{2**41 >> 20} MiB are needed" in spill.refusal(str(tmp_path), 2**40, 2)


@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_job_without_memory_yields_to_disk(
    way: str, no_memory: None, job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.rand(100_000)
    before = tensor.clone()
    turns = Turns(job, [1, 2])
    if way == "environment":
        monkeypatch.setenv("CADENZA_SPILL_DIR", str(tmp_path))
        client.attach(tensors=[tensor])
    else:
        client.attach(tensors=[tensor], spill=str(tmp_path))
    client.boundary()
    client.boundary()
    turns.finish()
    assert [message["bytes"] for message in turns.arrived] == [0, 0]  # of host memory
    assert [message["bytes"] for message in turns.yielded] == [400_000] * 2
    assert torch.equal(tensor, before)


def test_a_job_that_is_out_moves_on_to_disk_and_comes_back_with_every_bit(job: Peer, tmp_path: Path) -> None:
    """A full disk leaves the state in host memory, the next order tries again, and one more changes nothing."""
    tensor = torch.rand(100_000)
    before, sessions = tensor.clone(), list[Any]()

    def agent() -> list[tuple[int, str, bool]]:
        rank = job.rank(stop=1)
        assert rank.hello["spills"]
        rank.hear("arrived")
        rank.say("commit", order=1)
        rank.hear("yielded")
        seen = []
        for disk in (full_disk(100_000), contextlib.nullcontext(), contextlib.nullcontext()):
            with disk:
                rank.say("spill", order=2)
                answer = rank.hear("spilled")
            seen.append((answer.get("bytes", 0), answer.get("error", ""), sessions[0]._offload.host_bytes > 0))
        rank.clear()
        rank.say("resume", order=3)
        rank.hear("resumed")
        return seen

    script = Script(agent, job)
    sessions.append(client.attach(tensors=[tensor], spill=str(tmp_path)))
    client.boundary()
    full = f"no 0 MiB in {tmp_path}: File too large"
    assert script.finish() == [(0, full, True), (400_000, "", False), (0, "", False)]
    assert torch.equal(tensor, before)


def test_without_memory_and_without_disk_the_job_goes_on(no_memory: None, job: Peer, tmp_path: Path) -> None:
    """A full disk is refused; one that fills up after the commit is reported, and nothing has moved."""
    tensor = torch.ones(100_000)

    def agent() -> tuple[str, str]:
        rank = job.rank(stop=1)
        refused: str = rank.hear("arrived")["refused"]
        rank.stop_at(2, order=2)
        rank.say("cancel", order=1, reason="refused")
        assert rank.hear("arrived")["refused"] == ""
        with full_disk(100_000):
            rank.say("commit", order=2)
            error: str = rank.hear("yielded")["error"]
        rank.clear()
        return refused, error

    script = Script(agent, job)
    session = client.attach(tensors=[tensor], spill=str(tmp_path / "none"))
    client.boundary()
    session.spill_to = str(tmp_path)
    client.boundary()
    refused, error = script.finish()
    assert refused.startswith("host memory: the state takes 0 MiB")
    assert refused.endswith("none: No such file or directory")
    assert error == f"no 0 MiB in {tmp_path}: File too large"
    client.boundary()
    assert int(tensor.sum()) == 100_000
