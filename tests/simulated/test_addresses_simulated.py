"""Moves on the simulated GPU at which device addresses stay, over the preloaded library."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import simulated_gpu
import torch
from client_peer import Peer, Script, Turns, running, slurm_environment
from simulated_gpu import occupied
from test_offload_simulated import LATE_NS, SIZES, TOO_LATE_NS, assert_complete, attached, content, on_gpu

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import MoveError, NoRoomError, RestoreError
from cadenza.sidecar.client.offload import device
from cadenza.sidecar.client.offload.addresses import address_survey, preloaded
from cadenza.sidecar.client.offload.copy_plan import AddressPlan
from cadenza.sidecar.client.offload.engine import Offload

pytestmark = pytest.mark.slow
PRELOADED = True


def mapped() -> preloaded.Library:
    library = preloaded.library()
    assert library is not None
    return library


def on_gpu_now() -> int:
    """Return this process's bytes on the GPU, without its context."""
    gpu = simulated_gpu.GPU
    return gpu.bytes_of[os.getpid()] - gpu.context_bytes


def used_in_a_child(address: int) -> int:
    """Return the signal by which the use of an address ends a process."""
    child = os.fork()
    if child == 0:
        ctypes.c_char.from_address(address).value  # noqa: B018
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def test_content_and_addresses_are_the_same_and_a_use_meanwhile_faults() -> None:
    tensors, offload = on_gpu(), Offload()
    places = [tensor.data_ptr() for tensor in tensors]
    for _ in range(3):
        moved = offload.offload_in_place()
        assert offload.away
        assert (on_gpu_now(), mapped().counters().live_bytes, moved.left) == (0, 0, 0)
        assert moved.nbytes == mapped().counters().away_bytes
        assert {used_in_a_child(place) for place in places} == {signal.SIGSEGV}
        offload.restore()
        assert not offload.away
        assert [tensor.data_ptr() for tensor in tensors] == places
        assert {used_in_a_child(place) for place in places} == {0}
        assert_complete(tensors)
    offload.close()


@pytest.mark.parametrize("stream", ["own", "other"])
def test_a_move_in_place_waits_for_the_work_before_it(stream: str) -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    gpu.operator_ns = TOO_LATE_NS
    with torch.Stream("simulated") if stream == "other" else torch.no_grad():
        for tensor in tensors * 3:
            tensor.add_(1)
    module = device.ACCELERATORS["simulated"].module
    with mock.patch.object(module, "empty_cache"):  # CUDA's waits for nothing where the cache is empty
        offload.offload_in_place()
    gpu.operator_ns = 0
    offload.restore()
    assert_complete(tensors, added=3)


def test_segments_go_behind_their_copies_and_the_script_may_write_at_once_after() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    for rate, operator_ns in ((100 << 20, 0), (0, LATE_NS)):
        gpu.bytes_per_s, gpu.operator_ns = rate, operator_ns
        offload.offload_in_place()
        offload.restore()
        assert_complete(tensors)
    gpu.bytes_per_s = 100 << 20
    offload.offload_in_place()
    offload.restore()
    for tensor in tensors:
        tensor.add_(1)
    assert_complete(tensors, added=1)


def test_captured_pointers_go_on() -> None:
    """As those of DDP's buckets and of a replayed graph: the memory is written by its address, with no tensor."""
    tensors, offload = on_gpu(), Offload()
    accelerator, place = device.ACCELERATORS["simulated"], torch.device("simulated", 0)
    raw = [accelerator.at_address(place, tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    for step in range(1, 4):
        offload.offload_in_place()
        offload.restore()
        for one in raw:
            one.add_(1)
        assert_complete(tensors, added=step)


def test_a_resume_whose_nth_creation_fails_is_undone() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    offload.offload_in_place()
    count = mapped().counters().segments
    assert count > 1
    for number in range(1, count + 1):
        gpu.fail_creation = number
        with pytest.raises(NoRoomError):
            offload.restore()
        assert offload.away
        assert (on_gpu_now(), mapped().counters().live_bytes) == (0, 0)
    gpu.fail_creation = 0
    with occupied(gpu, gpu.capacity - gpu.context_bytes - (3 << 20)), pytest.raises(NoRoomError):
        offload.restore()
    assert on_gpu_now() == 0
    offload.restore()
    assert_complete(tensors)


def test_a_copy_back_that_fails_leaves_all_away() -> None:
    gpu, tensors, offload = simulated_gpu.GPU, on_gpu(), Offload()
    offload.offload_in_place()
    for number in (1, 2):
        gpu.fail_copy = number
        with pytest.raises(RestoreError):
            offload.restore()
        assert (offload.away, on_gpu_now()) == (True, 0)
    gpu.fail_copy = 0
    offload.restore()
    assert_complete(tensors)


def test_a_move_that_fails_leaves_all_where_it_was() -> None:
    gpu, tensors = simulated_gpu.GPU, on_gpu()
    for number in (1, 2):
        offload = Offload()
        gpu.fail_copy = number
        with pytest.raises(MoveError):
            offload.offload_in_place()
        gpu.fail_copy = 0
        assert not offload.away
        assert_complete(tensors)
    driver, offload, call = ctypes.CDLL("libcuda.so.1"), Offload(), ctypes.c_char_p(b"cuMemUnmap")
    for number in (1, 2):
        torch.accelerator.empty_cache()
        driver.stub_fail(call, number, 999)
        with pytest.raises(MoveError, match="error 999"):
            offload.offload_in_place()
        assert not offload.away
        assert_complete(tensors)
    offload.offload_in_place()
    offload.restore()
    assert_complete(tensors)


def test_a_segment_freed_while_it_is_away_is_not_written() -> None:
    tensors, offload = on_gpu(), Offload()
    offload.offload_in_place()
    gone = tensors.pop()
    segments = mapped().counters().segments
    del gone
    torch.accelerator.empty_cache()
    assert mapped().counters().segments < segments
    offload.restore()
    for size, tensor, expected in zip(SIZES, tensors, content(), strict=False):
        assert torch.equal(tensor.cpu(), expected), f"{size} bytes"


def test_a_checkpoint_of_state_that_is_away_in_place_has_its_content(tmp_path: Path) -> None:
    tensors, offload = on_gpu(), Offload()
    views = [tensor[1:] for tensor in tensors]
    offload.offload_in_place()
    torch.save([tensors, views], tmp_path / "away.pt")
    offload.restore()
    loaded, parts = torch.load(tmp_path / "away.pt", map_location="cpu")
    assert all(torch.equal(one, other) for one, other in zip(loaded, content(), strict=True))
    assert all(torch.equal(one, other[1:]) for one, other in zip(parts, content(), strict=True))
    assert_complete(tensors)


def test_addresses_that_cannot_stay_are_named() -> None:
    tensors = on_gpu()
    assert isinstance(address_survey.look(), AddressPlan)
    module = device.ACCELERATORS["simulated"].module
    snapshot, backend = module.memory_snapshot, module.get_allocator_backend
    try:
        module.get_allocator_backend = lambda: "cudaMallocAsync"
        assert "cudaMallocAsync" in str(address_survey.look())
        module.get_allocator_backend = backend
        foreign = {"device": 0, "address": 4096, "total_size": 6 << 20, "allocated_size": 0, "blocks": []}
        module.memory_snapshot = lambda: [*snapshot(), foreign]
        assert "6 MiB of torch's memory did not come through" in str(address_survey.look())
        module.memory_snapshot = lambda: [*snapshot(), {**foreign, "is_expandable": True}]
        assert "expandable segments" in str(address_survey.look())
    finally:
        module.memory_snapshot, module.get_allocator_backend = snapshot, backend
    del tensors


@hypothesis.given(st.lists(st.tuples(st.sampled_from(["take", "drop", "move", "full", "change"]), st.integers(0, 7))))
@hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
def sequences(words: list[tuple[str, int]]) -> None:
    """Take, drop and change tensors, and move: they must agree with their copies on the host."""
    gpu, offload, model = simulated_gpu.GPU, Offload(), []
    for word, number in words:
        if word == "take":
            host = torch.full(((1 << 18) + number * 700_000,), number + 1, dtype=torch.uint8)
            model.append((host, host.to("simulated")))
        elif word == "drop" and model:
            del model[number % len(model)]
        elif word == "change" and model:
            host, there = model[number % len(model)]
            host.add_(3), there.add_(3)
        elif word in ("move", "full") and model:
            places = [there.data_ptr() for _, there in model]
            offload.offload_in_place()
            assert on_gpu_now() == 0
            if word == "full":
                gpu.fail_creation = 1 + number % mapped().counters().segments
                with pytest.raises(NoRoomError):
                    offload.restore()
                gpu.fail_creation = 0
                assert on_gpu_now() == 0
            offload.restore()
            assert [there.data_ptr() for _, there in model] == places
        assert all(torch.equal(host, there.cpu()) for host, there in model)
    offload.close()


def test_random_sequences_agree_with_copies_on_the_host() -> None:
    sequences()


def test_a_job_yields_in_place_and_a_checkpoint_is_saved_meanwhile(tmp_path: Path) -> None:
    """Through the session: nothing is registered but the module, and all of torch's memory moves."""
    state, others = torch.nn.Module(), on_gpu()
    state.register_buffer("large", on_gpu()[-1])
    place = state.large.data_ptr()
    seen: list[int] = []
    with attached(tmp_path) as agent, client.checkpoint(tmp_path / "kept", model=state) as keeper:

        def script() -> list[dict[str, Any]]:
            rank = agent.rank(stop=1)
            arrived = rank.hear("arrived")
            rank.say("commit", order=1)
            yielded = rank.hear("yielded")
            seen.append(on_gpu_now())
            rank.say("save", order=3)
            saved = rank.hear("checkpointed")
            rank.clear()
            rank.say("resume", order=4)
            return [arrived, yielded, saved, rank.hear("resumed")]

        finish = Script(script, agent).finish
        client.attach(state, addresses="stay")
        keeper.at(1)
        client.boundary()
        arrived, yielded, saved, _ = finish()
        assert (arrived["refused"], saved["error"], seen) == ("", "", [0])
        assert yielded["bytes"] >= 2 * SIZES[-1]
        assert not yielded["resident"]
        assert state.large.data_ptr() == place
        assert torch.equal(state.large.cpu(), content()[-1])
        assert_complete(others)


def test_two_ranks_yield_with_their_buckets_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    """DDP's buckets are in nobody's hands, and their addresses in the reducer's."""
    path, stops, away = tmp_path / "gpu", [2, 3, 6], []
    gpu = simulated_gpu.create(path, context_bytes=1 << 20)
    peer = Peer(tmp_path / "agent")
    environment = slurm_environment(peer.path, SIMULATED_GPUS=str(path), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    command = [sys.executable, str(Path(__file__).with_name("staying_ranks.py")), str(tmp_path)]
    with running(command, command, envs=[{**environment, "RANK": rank} for rank in "01"]) as ranks:
        turns = Turns(peer, stops, ranks=2, while_away=lambda _: away.append(sorted(gpu.bytes_of.values())))
        turns.finish()
        for rank in ranks:
            assert rank.wait(60) == 0, rank.communicate()[1]
    peer.die()
    assert away == [[1 << 20, 1 << 20]] * len(stops)
    assert [(one["refused"], one["step"]) for one in turns.arrived] == [("", stop) for stop in stops for _ in range(2)]
    assert [(one["resident"], one["bytes"] > 10 << 20) for one in turns.yielded] == [([], True)] * 6
    for rank in "01":
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["shared"]["losses"] == found["alone"]["losses"]
        _, second, *others = found["shared"]["buckets"]  # after the first step they are made anew, once
        assert len(second) > 1
        assert others == [second] * len(others)


def test_a_job_whose_addresses_cannot_stay_yields_as_without_the_library() -> None:
    """The reason is said once; what the storages refuse, such as a graph's pool, is refused with it."""
    tensors, offload, module = on_gpu(), Offload(), device.ACCELERATORS["simulated"].module
    snapshot, sources = module.memory_snapshot, [("state", tensors)]
    other = {
        "device": 0,
        "address": 4096,
        "total_size": 6 << 20,
        "allocated_size": 1,
        "blocks": [],
        "is_expandable": True,
    }
    try:
        module.memory_snapshot = lambda: [*snapshot(), other]
        with unittest.TestCase().assertLogs("cadenza.client") as said:
            for _ in range(2):
                found = address_survey.survey(sources)
                assert (found.in_place, found.refusal) == (None, None)
        assert ["expandable segments" in one for one in said.output] == [True]
        offload.offload(found.segments)
        assert on_gpu_now() == 0
        offload.restore()
        assert_complete(tensors)
        module.memory_snapshot = lambda: [*snapshot(), {**other, "segment_pool_id": (0, 1)}]
        refusal = address_survey.survey(sources).refusal or ""
        assert "graph's private pool; addresses cannot stay: 6 MiB are in expandable segments" in refusal
    finally:
        module.memory_snapshot = snapshot
