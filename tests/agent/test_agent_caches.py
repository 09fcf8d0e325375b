"""Shared memory left by killed jobs is removed once they have left, and nothing else is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_rig import Agent, until

from cadenza.sidecar.agent.jobs import shm_cleanup
from cadenza.sidecar.client.data import shm_dirs

JOB = 2_000_000_000 + os.getpid()


@pytest.fixture
def left() -> Iterator[Path]:
    """Return a directory that a killed job has left, with a file in a directory of its own."""
    made = shm_dirs.job_directory(f"job{JOB}")
    (made / "train").mkdir(mode=0o700, parents=True)
    (made / "train" / "items").write_bytes(bytes(100))
    yield made
    shm_dirs.remove(f"job{JOB}")


def test_both_sides_mean_the_same_directory(tmp_path: Path) -> None:
    assert shm_cleanup.name_of(12, 34) == shm_dirs.job_directory("job34", tmp_path, 12).name


def test_what_a_job_left_goes_when_it_has_left(agent: Agent, left: Path) -> None:
    root = agent.talk()
    root.until_granted(root.start(JOB, [0]))
    assert left.exists()
    root.send("end", job=JOB)
    until(lambda: not left.exists(), "the caches to be removed")


@pytest.mark.slow
def test_a_job_that_another_job_would_displace_keeps_its_own(agent: Agent, left: Path) -> None:
    rank = agent.rank(JOB, "--gpus", "[0]")
    rank.wait_for("run")
    agent.talk().send("end", job=JOB + 1)
    agent.talk().ask("end", job=-1)
    assert left.exists()
    rank.kill()
    until(lambda: not left.exists(), "the caches to be removed after the last process")


def test_nothing_but_the_users_own_directory_is_touched(tmp_path: Path) -> None:
    uid, other = os.getuid(), tmp_path / "others"
    other.mkdir()
    (other / "file").touch()
    (tmp_path / shm_cleanup.name_of(uid, 1)).symlink_to(other)
    (tmp_path / shm_cleanup.name_of(uid, 2)).touch()
    (tmp_path / shm_cleanup.name_of(uid + 1, 3)).mkdir()
    mine = tmp_path / shm_cleanup.name_of(uid, 4)
    mine.mkdir()
    (mine / "link").symlink_to(other)
    removed = [shm_cleanup.remove(*who, tmp_path) for who in ((uid, 1), (uid, 2), (uid + 1, 3), (uid, 4), (uid, 5))]
    assert removed == [False, False, False, True, False]
    assert not mine.exists()
    assert (other / "file").exists()
    assert not shm_cleanup.remove(uid, 1, tmp_path / "absent")
