"""The plan of a move: each storage once, in its own place, small ones together; staging changes no byte."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cadenza.sidecar.client.offload import copy_plan, engine, host_memory
from cadenza.sidecar.client.offload.copy_plan import ALIGNMENT, SMALL_BYTES, STAGING_BYTES
from cadenza.sidecar.client.offload.engine import Transfer
from cadenza.sidecar.client.offload.storages import Segment

LIMITS = [SMALL_BYTES - 1, SMALL_BYTES, SMALL_BYTES + 1]
SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * SMALL_BYTES), st.sampled_from(LIMITS))


@given(st.lists(st.tuples(st.sampled_from(["cuda:0", "cuda:1", "cpu"]), SIZES), max_size=120))
def test_every_storage_has_one_place(sizes: list[tuple[str, int]]) -> None:
    plan = copy_plan.plan(sizes)
    assert sorted(index for batch in plan for index in batch.members) == list(range(len(sizes)))
    for before, after in pairwise(plan):
        assert before.offset + before.nbytes == after.offset
    for batch in plan:
        assert batch.sizes == tuple(sizes[index][1] for index in batch.members)
        assert batch.nbytes == sum(map(copy_plan.aligned, batch.sizes))
        assert batch.offset % ALIGNMENT == 0
        assert not batch.gathered or batch.nbytes <= STAGING_BYTES
        assert not batch.gathered or max(batch.sizes) < SMALL_BYTES
        assert len({sizes[index][0] for index in batch.members}) == 1
    assert copy_plan.total(plan) == sum(copy_plan.aligned(nbytes) for _, nbytes in sizes)


def test_small_storages_take_few_copies() -> None:
    plan = copy_plan.plan([("cuda:0", 32 * 1024)] * 2048 + [("cuda:0", 5 * SMALL_BYTES)])
    assert [len(batch.members) for batch in plan] == [1024, 1024, 1]
    assert copy_plan.plan([]) == []
    assert copy_plan.total([]) == 0


def state(seed: int) -> tuple[list[torch.Tensor], list[Segment]]:
    """Return tensors of odd sizes and dtypes, and their segments."""
    draw = random.Random(seed)  # noqa: S311
    dtypes = [torch.float32, torch.uint8, torch.bfloat16, torch.int64]
    tensors = [torch.randint(0, 100, (draw.choice([1, 3, 700, 99_991]),)).to(draw.choice(dtypes)) for _ in range(40)]
    tensors.append(torch.rand(600_000))
    storages = [tensor.untyped_storage() for tensor in tensors]
    return tensors, [Segment(str(index), storage, storage.nbytes()) for index, storage in enumerate(storages)]


@pytest.mark.parametrize("staging", [0, 4096, STAGING_BYTES])
def test_a_move_through_staging_is_the_same_move(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path that small storages take on a GPU, with a staging buffer that happens to lie on the CPU."""
    tensors, segments = state(1)
    copies = [tensor.clone() for tensor in tensors]
    versions = [tensor._version for tensor in tensors]
    plan = engine.plan_of(segments)
    memory = host_memory.HostBuffer().reserve(copy_plan.total(plan), None)
    original = engine.CopyStream.__init__
    staged = lambda stream, device, _, bounds: original(stream, device, staging, bounds)  # noqa: E731
    monkeypatch.setattr(engine.CopyStream, "__init__", staged)
    transfer = Transfer(segments, plan, memory)
    transfer.offload()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
    transfer.restore()
    assert all(torch.equal(now, then) for now, then in zip(tensors, copies, strict=True))
    assert [tensor._version for tensor in tensors] == versions


def test_a_restore_that_fails_half_way_leaves_all_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, segments = state(2)
    copies = [tensor.clone() for tensor in tensors]
    moved = engine.Offload()
    moved.offload(segments)
    original = engine.CopyStream.copy

    def full(self: engine.CopyStream, raws: object, batch: copy_plan.Batch, *rest: object, out: bool) -> None:
        if not batch.gathered:
            raise RuntimeError("out of memory")
        original(self, raws, batch, *rest, out=out)

    with monkeypatch.context() as patch:
        patch.setattr(engine.CopyStream, "copy", full)
        with pytest.raises(engine.NoRoomError, match="out of memory"):
            moved.restore()
    assert moved.away
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0] * len(tensors)
    moved.restore()
    assert all(torch.equal(now, then) for now, then in zip(tensors, copies, strict=True))
