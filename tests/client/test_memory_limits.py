"""A yield that exceeds the job's memory limit is refused before anything moves, with the limit's name."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from client_peer import Peer, Script

from cadenza.sidecar import client
from cadenza.sidecar.client.offload.host import memory_limits

MIB = 2**20


def group(folder: Path, **files: object) -> None:
    """Write a control group's files; ``_`` stands for a point in their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")


def process(root: Path, text: str) -> None:
    """Write /proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)


def test_version_2_takes_the_least_headroom_of_all_parents(tmp_path: Path) -> None:
    process(tmp_path, "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n")
    scope = tmp_path / "sys/fs/cgroup/system.slice/slurmstepd.scope"
    group(scope, memory_current=9000 * MIB, memory_max="max")
    group(scope / "job_7", memory_current=700 * MIB, memory_max=1000 * MIB, memory_high="max")
    group(scope / "job_7/step_0", memory_current=600 * MIB, memory_max=2000 * MIB, memory_high=1500 * MIB)
    group(scope / "job_7/step_0/user/task_0", memory_current=600 * MIB, memory_max="max", memory_high="max")
    assert memory_limits.headroom(tmp_path) == (300 * MIB, scope / "job_7/memory.max")
    group(scope / "job_7", memory_stat=f"anon 1\ninactive_file {50 * MIB}")
    assert memory_limits.headroom(tmp_path) == (350 * MIB, scope / "job_7/memory.max")
    group(scope / "job_7", memory_high=800 * MIB)
    assert memory_limits.headroom(tmp_path) == (150 * MIB, scope / "job_7/memory.high")


def test_version_1(tmp_path: Path) -> None:
    process(tmp_path, "5:cpuset,cpu:/slurm\n4:memory:/slurm/uid_1/job_7/step_0\n0::/\n")
    job = tmp_path / "sys/fs/cgroup/memory/slurm/uid_1/job_7"
    group(job, memory_limit_in_bytes=1000 * MIB, memory_usage_in_bytes=900 * MIB)
    group(job / "step_0", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=900 * MIB)
    group(job, memory_stat=f"inactive_file 7\ntotal_inactive_file {20 * MIB}")
    assert memory_limits.headroom(tmp_path) == (120 * MIB, job / "memory.limit_in_bytes")


def test_a_path_of_another_namespace_leaves_the_mount_itself(tmp_path: Path) -> None:
    process(tmp_path, "0::/../../job_7\n")
    group(tmp_path / "sys/fs/cgroup", memory_current=10 * MIB, memory_max=30 * MIB)
    assert memory_limits.headroom(tmp_path) == (20 * MIB, tmp_path / "sys/fs/cgroup/memory.max")


@pytest.mark.parametrize("text", ["", "nonsense\n", "0::/elsewhere\n", "3:cpu:/x\n"])
def test_without_a_readable_limit_nothing_is_refused(tmp_path: Path, text: str) -> None:
    process(tmp_path, text)
    assert memory_limits.headroom(tmp_path) is None
    assert memory_limits.refusal(10**15, 1, tmp_path) is None
    assert memory_limits.headroom(tmp_path / "nowhere") is None


def test_the_host_has_a_limit_too(tmp_path: Path) -> None:
    process(tmp_path, "0::/job_7\n")
    group(tmp_path / "sys/fs/cgroup/job_7", memory_current=100 * MIB, memory_max=1100 * MIB)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal:  9 kB\nMemAvailable:   {200 << 10} kB\nSwapFree:  0 kB\n")
    assert memory_limits.headroom(tmp_path) == (200 * MIB, tmp_path / "proc/meminfo")
    assert memory_limits.refusal(300 * MIB, 1, tmp_path) == (
        f"host memory: the state takes 300 MiB and the host leaves 200 MiB (margin 1.1; {tmp_path}/proc/meminfo)"
    )


IN_A_GROUP = """
import json, mmap, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text("0")
from cadenza.sidecar.client.offload.host import memory_limits
before = memory_limits.headroom()
taken = mmap.mmap(-1, 50 << 20, flags=mmap.MAP_PRIVATE)
for place in range(0, len(taken), 4096):
    taken[place] = 1
now = memory_limits.headroom().nbytes
print(json.dumps([str(before.limit), before.nbytes, now, memory_limits.refusal(100 << 20, 1)]))
"""


@pytest.fixture
def memory_group(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real control group of 128 MiB where this process may make one (root; version 1, or 2 with the controller)."""
    own = next(iter(memory_limits._groups(Path("/"))))
    for parent in (Path("/", mount) / own[1].strip("/") for mount in own[0].mounts):
        made = parent / f"cadenza-test-{os.getpid()}"
        try:
            made.mkdir()
            (made / own[0].limits[0]).write_text(str(128 * MIB))
        except OSError as error:
            with contextlib.suppress(OSError):
                made.rmdir()
            request.node.add_report_section("call", "not run", f"no control group of its own: {error}")
            continue
        yield made
        made.rmdir()
        return
    yield Path()


def test_a_real_groups_limit_is_read_from_inside(memory_group: Path) -> None:
    """Without the right to make a group this test passes; the other tests use plain files."""
    if memory_group == Path():
        return
    command = [sys.executable, "-c", IN_A_GROUP, str(memory_group)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    limit, before, after, refusal = json.loads(done.stdout)
    assert Path(limit).parent == memory_group
    assert 100 * MIB < before < 128 * MIB
    assert 40 * MIB < before - after < 60 * MIB
    assert refusal.startswith("host memory: the state takes 100 MiB and the job's limit leaves ")


def test_the_ranks_of_a_node_share_the_limit(tmp_path: Path) -> None:
    process(tmp_path, "0::/job_7\n")
    group(tmp_path / "sys/fs/cgroup/job_7", memory_current=100 * MIB, memory_max=1100 * MIB)
    assert memory_limits.refusal(400 * MIB, 2, tmp_path) is None
    assert memory_limits.refusal(500 * MIB, 2, tmp_path) == (
        "host memory: the state of 2 ranks takes 1000 MiB and the job's limit leaves 1000 MiB "
        f"(margin 1.1; {tmp_path}/sys/fs/cgroup/job_7/memory.max): ask for more with --mem"
    )
    group(tmp_path / "sys/fs/cgroup/job_7", memory_current=1200 * MIB)
    assert memory_limits.refusal(0, 2, tmp_path) is memory_limits.refusal(-1, 2, tmp_path) is None
    assert "leaves 0 MiB" in memory_limits.refusal(1, 1, tmp_path)


def test_a_short_limit_is_reported_to_the_agent_and_nothing_moves(
    job: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(tmp_path, "0::/job_4711\n")
    group(tmp_path / "sys/fs/cgroup/job_4711", memory_current=900 * MIB, memory_max=901 * MIB)
    monkeypatch.setattr(memory_limits.refusal, "__defaults__", (tmp_path,))
    tensor = torch.ones(300_000)

    def agent() -> str:
        rank = job.rank(stop=1)
        refused: str = rank.hear("arrived")["refused"]
        assert tensor.untyped_storage().nbytes() == 1_200_000
        rank.clear()
        rank.say("cancel", order=1, reason="refused")
        return refused

    script = Script(agent, job)
    session = client.attach(tensors=[tensor])
    session.boundary()
    assert script.finish().startswith("host memory: the state takes 1 MiB and the job's limit leaves 1 MiB")
    session.boundary()
