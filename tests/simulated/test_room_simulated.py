"""Room on each GPU for the way back: for the state, for what communicators take beside it, and only where it was."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch
from client_peer import Peer, Script, slurm_environment
from simulated_gpu import occupied

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import NoRoomError
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.process_look import ProcessLook
from cadenza.sidecar.client.offload.storages import survey
from cadenza.sidecar.client.session import communicators, job_session

pytestmark = pytest.mark.slow

MIB = 1 << 20
NCCL_BYTES = 10 * MIB


def test_a_gpu_without_room_for_the_communicators_gives_the_state_nothing() -> None:
    """The state alone would fit, and each rank would then wait for the others inside NCCL."""
    gpu, offload = simulated_gpu.GPU, Offload()
    tensor = torch.full((16 * MIB,), 7, dtype=torch.uint8, device="simulated")
    moved = offload.offload(survey([("tensors", [tensor])]).segments)
    assert moved.by_gpu == {0: (16 * MIB, 0)}
    free = gpu.capacity - gpu.bytes_of[os.getpid()]
    with occupied(gpu, free - 20 * MIB):
        with pytest.raises(NoRoomError, match="16 MiB of state and 10 MiB of NCCL: 20 MiB are free"):
            offload.restore({0: NCCL_BYTES})
        assert offload.away
        assert gpu.bytes_of[os.getpid()] == gpu.context_bytes
        offload.restore({1: NCCL_BYTES})  # of another GPU
        offload.offload(survey([("tensors", [tensor])]).segments)
    offload.restore({0: NCCL_BYTES})
    assert int(tensor.cpu().min()) == 7
    offload.close()


class Communicator:
    """A backend whose suspend frees memory of the simulated GPU."""

    suspended = False

    def suspend(self) -> None:
        self.suspended = True

    def resume(self) -> None:
        self.suspended = False

    def memory_stats(self) -> dict[str, int]:
        return {"suspend": NCCL_BYTES, "suspended": int(self.suspended), "total": 2 * NCCL_BYTES}


def test_a_rank_gives_its_lease_back_before_it_enters_nccl(tmp_path: Path) -> None:
    gpu, backend, peer = simulated_gpu.GPU, Communicator(), Peer(tmp_path / "agent")
    tensor = torch.full((16 * MIB,), 7, dtype=torch.uint8, device="simulated")
    patch = pytest.MonkeyPatch()
    patch.setattr(communicators.Communicators, "_backends", lambda *_: [(backend, 0)])
    patch.setattr(communicators, "_agreed", lambda *_: True)
    patch.setattr(job_session, "RESTORE_RETRY_S", 0.001)
    patch.setattr(os, "environ", slurm_environment(peer.path))
    importlib.import_module("torch.distributed.distributed_c10d")  # a job that has ranks

    def agent() -> list[dict[str, Any]]:
        rank = peer.rank(stop=1)
        rank.hear("arrived")
        rank.say("commit", order=1)
        heard = [rank.hear("yielded")]
        rank.clear()
        with occupied(gpu, gpu.capacity - sum(gpu.bytes_of.values()) - 20 * MIB):
            rank.say("resume", order=1)
            heard.append(rank.hear("yielded"))
            assert backend.suspended
        rank.say("resume", order=1)
        return [*heard, rank.hear("resumed")]

    try:
        finish = Script(agent, peer).finish
        client.attach(tensors=[tensor])
        client.boundary()
        left, full, _ = finish()
        assert (left["needed_bytes"], left["regrown_bytes"]) == ([16 * MIB], [NCCL_BYTES])
        assert "10 MiB of NCCL" in full["no_room"]
        assert (backend.suspended, int(tensor.cpu().min())) == (False, 7)
        client.detach()
    finally:
        patch.undo()
        peer.die()


def test_the_boundary_before_a_stop_looks_at_the_process(tmp_path: Path) -> None:
    """It takes tenths of a second with millions of objects, and at the stop the GPU would wait for it."""
    peer, patch, looked = Peer(tmp_path / "agent"), pytest.MonkeyPatch(), list[int]()
    tensor = torch.full((MIB,), 7, dtype=torch.uint8, device="simulated")
    patch.setattr(os, "environ", slurm_environment(peer.path))
    ordered = threading.Event()

    def agent() -> dict[str, Any]:
        rank = peer.rank()
        rank.stop_at(600, 1)
        ordered.set()
        assert rank.hear("arrived")["step"] == 600
        rank.say("commit", order=1)
        left = rank.hear("yielded")
        rank.clear()
        rank.say("resume", order=1)
        rank.hear("resumed")
        return left

    try:
        finish = Script(agent, peer).finish
        session = client.attach(tensors=[tensor])
        original = ProcessLook.ahead
        patch.setattr(ProcessLook, "ahead", lambda: (looked.append(session.step), original())[1])
        assert ordered.wait(60)
        for _ in range(600):
            session.boundary()
        left = finish()
        assert looked == [599]
        assert 0 < left["survey_s"] < 60
        client.detach()
    finally:
        patch.undo()
        peer.die()


def test_a_rank_that_never_chose_a_gpu_yields_the_one_it_uses(tmp_path: Path) -> None:
    """The figures are the second GPU's, its memory is pinned ahead, and nothing opens a context on the first."""
    paths = [tmp_path / name for name in ("first", "second")]
    first, second = (simulated_gpu.create(path, context_bytes=MIB) for path in paths)
    peer = Peer(tmp_path / "agent")

    def agent() -> dict[str, Any]:
        rank = peer.rank(stop=2)
        arrived = rank.hear("arrived")
        assert (arrived["held_bytes"][0], arrived["stays_bytes"]) == (0, [0, 0])
        second.fail_registration = 1  # it is pinned already
        rank.say("commit", order=1)
        left = rank.hear("yielded")
        assert second.bytes_of == {rank_process.pid: MIB}
        rank.clear()
        rank.say("resume", order=1)
        rank.hear("resumed")
        rank.hear("detach")
        return left

    script = Path(__file__).with_name("second_gpu_rank.py")
    environment = slurm_environment(peer.path, SIMULATED_GPUS=":".join(map(str, paths)))
    rank_process = subprocess.Popen([sys.executable, str(script)], env=environment)
    try:
        left = Script(agent, peer).finish()
        assert rank_process.wait(60) == 0
    finally:
        rank_process.kill()
        peer.die()
    assert left["needed_bytes"] == [0, 12 * MIB]
    assert first.bytes_of == {}
    assert second.fail_registration == 1
