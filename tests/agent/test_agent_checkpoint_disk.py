"""A checkpoint ordered of a real client whose disk is full: told, the job runs on, the one before restores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from agent_rig import Agent
from registered_job import registered
from test_agent_link import Service, fact, service  # noqa: F401 (a fixture)

from cadenza.sidecar import orders, wire

JOB = Path(__file__).with_name("keeping_job.py")

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Return a disk with room for one checkpoint and a half, and a limit for files where none can be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)]
    mounted = subprocess.run(command, check=False, capture_output=True).returncode == 0
    yield place, 0 if mounted else 1 << 20
    if mounted:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_fails_the_order_and_nothing_else(
    new_agent: Callable[..., Agent], service: Service, disk: tuple[Path, int], tmp_path: Path,  # noqa: F811
) -> None:  # fmt: skip
    host = new_agent(service=f"tcp://127.0.0.1:{service.port}", keys=str(tmp_path / "keys")).up()
    (place, limit), end = disk, tmp_path / "end"
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "CADENZA_"))}
    environment = {**kept, "SLURM_JOB_ID": "1", wire.SOCKET_ENV: str(host.socket)}
    child = subprocess.Popen(
        registered(host.socket, 1, [0], sys.executable, str(JOB), str(place), str(end), str(limit)),
        env=environment, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        service.wait_for(orders.Report, lambda report: report.leases)
        service.facts(fact(1))
        service.lease(1, lambda lease: lease.ready and lease.checkpoints and lease.step > 1)
        service.order(orders.CheckpointOrder, 1, timeout_s=30.0, save_s=30.0, hold_s=30.0)
        done = service.wait_for(orders.Switched, lambda one: one.kind != "resume")
        assert done.kind == "refused"
        assert "File too large" in done.note if limit else "No space left on device" in done.note
        failed_at = service.lease(1, lambda lease: lease.state == "held" and not lease.saved).step
        service.lease(1, lambda lease: lease.step > failed_at + 2)
        end.touch()
        told = json.loads(child.communicate(timeout=60)[0])
    finally:
        child.kill()
        child.wait()
    assert (told["restored"], told["weight"]) == (1, 1.0)
    assert [path.name for path in place.glob("step-*")] == ["step-00000001"]
