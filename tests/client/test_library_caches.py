"""Caches of torch's libraries are given back before the allocator's, with whichever functions torch has."""

from __future__ import annotations

import types

import pytest
import torch

from cadenza.sidecar.client.offload import engine, library_caches

GPU = torch.device("cuda", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    plans = {GPU: types.SimpleNamespace(clear=lambda: made.append("plans"))}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.backends.cuda, "cufft_plan_cache", plans)
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", lambda: made.append("host"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("allocator"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7)
    return made


def test_a_move_gives_them_back_first(calls: list[str]) -> None:
    """Workspaces are blocks of torch's allocator: emptying it returns only what they have left."""
    assert engine._empty_caches([GPU]) == {GPU: 7}
    assert calls == ["workspaces", "plans", "host", "allocator"]
    assert engine._empty_caches([]) == {}
    assert len(calls) == 4


def test_one_that_torch_lacks_or_that_fails_is_left(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.delattr(torch.backends.cuda, "cufft_plan_cache")
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", broken)
    monkeypatch.delattr(torch.accelerator, "empty_host_cache")
    engine._empty_caches([GPU])
    assert calls == ["allocator"]
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    library_caches.release([GPU])


def test_a_device_that_fails_then_ends_no_move(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is out by then; an error would leave the boundary without it."""

    def lost() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "empty_cache", lost)
    assert engine._empty_caches([GPU]) == {}
