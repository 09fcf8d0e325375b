"""The engine on the simulated GPU: real contents out and back, late work, full and failing devices.

``mutants.py`` lists changes of the engine; each must fail one of these tests.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import offload_jobs
import pytest
import simulated_gpu
import torch
import torch.distributed.checkpoint as dcp
from client_peer import Peer, Script, Turns, slurm_environment
from simulated_gpu import occupied
from test_offload_cycles import NAMES, STOPS, train

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError, NoRoomError, RestoreError
from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.engine import Offload
from cadenza.sidecar.client.offload.storages import survey

pytestmark = pytest.mark.slow

SIZES = [3, 700, 40_000, 250_000, 1 << 20, 5 << 20]
"""Bytes of a test's tensors: some share a copy, and some have one of their own."""
LATE_NS = 3_000_000
TOO_LATE_NS = 30_000_000
"""Longer than this process stands still where the processors are busy, which would do the work of a missing wait."""


def content() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 255, (size,), dtype=torch.uint8, generator=generator) for size in SIZES]


def on_gpu() -> list[torch.Tensor]:
    tensors = [tensor.to("simulated") for tensor in content()]
    torch.accelerator.synchronize()
    return tensors


def assert_complete(tensors: list[torch.Tensor], added: int = 0) -> None:
    """Read what the script's own stream reads now, without a wait for the others."""
    copies = [tensor.clone() for tensor in tensors]
    for size, copy, expected in zip(SIZES, copies, content(), strict=True):
        assert torch.equal(copy.cpu(), expected + added), f"{size} bytes"


def used() -> int:
    """Return this process's bytes on the GPU, without its context."""
    gpu = simulated_gpu.GPU
    return gpu.bytes_of[os.getpid()] - gpu.context_bytes


def segments_of(tensors: list[torch.Tensor]) -> Any:
    found = survey([("state", tensors)])
    assert found.refusal is None
    assert len(found.segments) == len(tensors)
    return found.segments


@contextlib.contextmanager
def attached(tmp_path: Path) -> Iterator[Peer]:
    """This process as a job's only rank."""
    agent, before = Peer(tmp_path / "agent.sock"), dict(os.environ)
    os.environ.update(slurm_environment(agent.path))
    try:
        yield agent
    finally:
        client.detach()
        agent.die()
        os.environ.clear()
        os.environ.update(before)


@pytest.mark.parametrize("name", NAMES)
def test_a_job_that_yields_computes_the_same(tmp_path: Path, name: str) -> None:
    alone = train(offload_jobs, name, device="simulated")
    seen: list[int] = []
    with attached(tmp_path) as agent:
        turns = Turns(agent, STOPS, while_away=lambda cycle: seen.append(used()))
        assert train(offload_jobs, name, turns, device="simulated") == alone
        turns.finish()
    assert [message["step"] for message in turns.arrived] == STOPS
    assert all(message["bytes"] > 0 and not message["resident"] for message in turns.yielded)
    for arrived, yielded in zip(turns.arrived, turns.yielded, strict=True):
        (held,), (stays,) = arrived["held_bytes"], arrived["stays_bytes"]
        assert simulated_gpu.GPU.capacity > held >= yielded["bytes"] + yielded["left"]
        assert yielded["left"] - (22 << 20) <= stays <= yielded["left"] + (1 << 20), "but for the allocator's rounding"
    assert max(seen) <= 22 << 20, "at most a segment of each size stays, for the loop's own tensors"


@pytest.mark.parametrize("stream", ["own", "other"])
def test_a_move_waits_for_the_work_before_it_in_all_streams(stream: str) -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    segments = segments_of(tensors)
    gpu.operator_ns = TOO_LATE_NS
    with torch.Stream("simulated") if stream == "other" else contextlib.nullcontext():
        for tensor in tensors * 3:
            tensor.add_(1)
    offload.offload(segments)
    gpu.operator_ns = 0
    offload.restore()
    assert_complete(tensors, added=3)


def test_memory_is_released_after_its_copy_and_read_after_its_way_back() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    segments = segments_of(tensors)
    for rate, operator_ns in ((100 << 20, 0), (0, LATE_NS)):
        gpu.bytes_per_s, gpu.operator_ns = rate, operator_ns
        offload.offload(segments)
        assert used() == 0
        offload.restore()
        assert_complete(tensors)


def test_a_script_may_overwrite_its_tensors_at_once_after_they_are_back() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    segments = segments_of(tensors)
    offload.offload(segments)
    gpu.bytes_per_s, gpu.operator_ns = 100 << 20, 1_000_000
    offload.restore()
    for tensor in tensors:
        tensor.add_(1)
    assert_complete(tensors, added=1)


def test_the_host_copy_is_pinned_once_and_let_go_at_the_end() -> None:
    tensors, offload = on_gpu(), Offload()
    before = simulated_gpu.library().simulated_pinned()
    for _ in range(3):
        offload.offload(segments_of(tensors))
        assert simulated_gpu.library().simulated_pinned() == before + 1
        offload.restore()
    offload._buffer.free()
    assert simulated_gpu.library().simulated_pinned() == before


def test_a_copy_that_fails_leaves_all_where_it_was() -> None:
    gpu, tensors = simulated_gpu.GPU, on_gpu()
    gpu.bytes_per_s = 400 << 20
    failed = 0
    while failed < 50:
        offload = Offload()
        gpu.fail_copy = failed + 1
        try:
            offload.offload(segments_of(tensors))
        except MoveError:
            failed += 1
            gpu.fail_copy = 0
            assert not offload.away
            assert_complete(tensors)
            continue
        break
    gpu.fail_copy = 0
    assert failed >= 3
    offload.restore()
    assert_complete(tensors)


def test_work_that_fails_between_the_copies_leaves_all_where_it_was() -> None:
    """The first batches are out and released when a later one fails."""
    tensors, offload = on_gpu(), Offload()
    accelerator, waits = device.ACCELERATORS["simulated"], iter([False, False, True])

    class Failing(torch.Stream):
        """Stream whose third event tells of an error."""

        def record_event(self, event: torch.Event | None = None) -> Any:
            recorded = super().record_event(event)

            def wait() -> None:
                recorded.synchronize()
                if next(waits, False):
                    raise RuntimeError("an error of an earlier kernel")

            return SimpleNamespace(synchronize=wait)

    accelerator.new_stream = Failing  # type: ignore[method-assign]
    try:
        with pytest.raises(MoveError, match="an earlier kernel"):
            offload.offload(segments_of(tensors))
    finally:
        del accelerator.new_stream
    assert not offload.away
    assert_complete(tensors)


def test_a_neighbor_that_keeps_the_memory_leaves_the_state_away() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    segments = segments_of(tensors)
    offload.offload(segments)
    with occupied(gpu, gpu.capacity - gpu.context_bytes - (7 << 20)):
        for _ in range(2):
            with pytest.raises(NoRoomError):
                offload.restore()
            assert offload.away
            assert used() == 0, "memory that came back before the failure is given back"
    offload.restore()
    assert_complete(tensors)


def test_an_allocation_or_copy_that_fails_on_the_way_back_leaves_the_state_away() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    offload.offload(segments_of(tensors))
    for word, error in (("fail_allocation", NoRoomError), ("fail_copy", RestoreError)):
        for number in (2, 3, 4, 5):
            setattr(gpu, word, number)
            with pytest.raises(error):
                offload.restore()
            assert offload.away
            assert used() == 0
    gpu.fail_allocation = gpu.fail_copy = 0
    offload.restore()
    assert_complete(tensors)


def test_a_job_whose_gpu_fails_at_the_resume_saves_its_host_copy_and_waits_on(tmp_path: Path) -> None:
    gpu, state = simulated_gpu.GPU, torch.nn.Module()
    state.register_buffer("large", on_gpu()[-1])
    with attached(tmp_path) as agent, client.checkpoint(tmp_path / "kept", model=state) as keeper:

        def script() -> list[dict[str, Any]]:
            rank = agent.rank(stop=1)
            rank.hear("arrived")
            rank.say("commit", order=1)
            rank.hear("yielded")
            gpu.lost = 1
            rank.say("resume", order=2)
            failed = rank.hear("yielded")
            rank.say("save", order=3)
            saved = rank.hear("checkpointed")
            gpu.lost = 0
            rank.clear()
            rank.say("resume", order=4)
            return [failed, saved, rank.hear("resumed")]

        finish = Script(script, agent).finish
        client.attach(state)
        keeper.at(1)
        client.boundary()
        failed, saved, _ = finish()
        assert "the GPU is lost" in failed["failed"]
        assert (saved["error"], saved["step"]) == ("", 1)
        assert torch.equal(state.large.cpu(), content()[-1])
        state.large.zero_()
        assert keeper.restore() == 1
        assert torch.equal(state.large.cpu(), content()[-1])


def test_a_full_gpu_copies_small_storages_one_by_one() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    with occupied(gpu, gpu.capacity - gpu.context_bytes - used()):
        offload.offload(segments_of(tensors))
        assert used() == 0
    offload.restore()
    assert_complete(tensors)


def test_the_state_goes_through_a_file_when_host_memory_is_short(tmp_path: Path) -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    gpu.operator_ns = LATE_NS // 10
    offload.spill_to = str(tmp_path)
    offload.offload(segments_of(tensors))
    assert used() == 0
    offload.restore()
    assert_complete(tensors)


def test_a_checkpoint_of_state_that_is_away_has_its_content(tmp_path: Path) -> None:
    tensors, offload = on_gpu(), Offload()
    offload.offload(segments_of(tensors))
    torch.save(tensors, tmp_path / "away.pt")
    loaded = torch.load(tmp_path / "away.pt", map_location="cpu")
    assert all(torch.equal(one, other) for one, other in zip(loaded, content(), strict=True))
    parameters = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    dcp.async_save({"state": parameters}, checkpoint_id=tmp_path / "away", no_dist=True).result()
    loaded = [torch.zeros_like(tensor) for tensor in content()]
    dcp.load({"state": loaded}, checkpoint_id=tmp_path / "away", no_dist=True)
    assert all(torch.equal(one, other) for one, other in zip(loaded, content(), strict=True))
    offload.restore()
    assert_complete(tensors)
