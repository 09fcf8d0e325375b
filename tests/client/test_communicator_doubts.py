"""A communicator whose suspend failed or goes on comes back, or ends its rank before the next collective."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cadenza.sidecar.client.errors import RestoreError
from cadenza.sidecar.client.session import communicators
from cadenza.sidecar.client.session.communicators import Communicators

MIB = 1 << 20


class Backend:
    """A communicator; ``error`` is that of its suspend, after which it is suspended ``pending`` looks later."""

    def __init__(self, error: str = "", pending: int | None = 0, *, tells: bool = True) -> None:
        self.error, self.pending, self.tells = error, pending, tells
        self.options = SimpleNamespace(config=SimpleNamespace(blocking=-(2**31)))
        self.calls: list[str] = []

    def suspend(self) -> None:
        self.calls.append("suspend")
        if self.error:
            raise RuntimeError(self.error)

    def resume(self) -> None:
        self.calls.append("resume")
        if not self._suspended:
            raise RuntimeError("ncclInvalidUsage: it is not suspended")
        self.calls.clear()

    @property
    def _suspended(self) -> bool:
        return "suspend" in self.calls and self.pending is not None and self.calls.count("look") >= self.pending

    def memory_stats(self) -> dict[str, int]:
        if not self.tells:
            raise RuntimeError("needs NCCL 2.29.7")
        self.calls.append("look")
        return {"suspend": 5 * MIB, "suspended": int(self._suspended), "total": 7 * MIB}


class Group:
    """A process group of one backend, bound to a GPU."""

    bound_device_id = torch.device("cuda", 2)

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def _get_backend(self, _: torch.device) -> Backend:
        return self._backend


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a process group of a backend, in which all ranks agree."""
    module = torch.distributed.distributed_c10d
    monkeypatch.setitem(communicators.BACKENDS, "stand-in", "cpu")
    monkeypatch.setattr(communicators, "_agreed", lambda *_: True)
    monkeypatch.setattr(communicators, "RETRY_S", 0.001)
    monkeypatch.setattr(communicators, "PENDING_NS", 50_000_000)

    def make(backend: Backend) -> None:
        monkeypatch.setitem(module._pg_map, Group(backend), ("stand-in", None))  # type: ignore[arg-type]

    return make


@pytest.mark.parametrize("error", ["", "NCCL operation in progress", "ncclSystemError: of one rank"])
def test_a_suspend_that_goes_on_is_waited_for_and_resumed(group: Any, error: str) -> None:
    backend, ours = Backend(error, pending=4), Communicators(1)
    group(backend)
    ours.suspend("3")
    assert backend.memory_stats()["suspended"]
    assert ours.freed == {2: 5 * MIB}
    ours.resume()
    assert (backend.calls, ours.freed) == ([], {})


def test_a_suspend_that_may_have_half_failed_ends_the_rank_before_its_next_collective(group: Any) -> None:
    backend, ours = Backend("ncclUnhandledCudaError: out of host memory", pending=None), Communicators(1)
    group(backend)
    ours.suspend("3")
    with pytest.raises(RestoreError, match=r"may have lost its GPU memory .*out of host memory.*not suspended"):
        ours.resume()


def test_a_refused_suspend_leaves_the_communicator_as_it_was(group: Any, caplog: pytest.LogCaptureFixture) -> None:
    """NCCL checks the call before it touches anything, and nothing is resumed: the others would not come."""
    caplog.set_level(logging.WARNING)
    backend, ours = Backend("ncclInvalidUsage: no memory manager", pending=None), Communicators(1)
    group(backend)
    ours.suspend("3")
    ours.resume()
    assert (backend.calls.count("resume"), ours.freed) == (0, {})
    assert "keeps its GPU memory: ncclInvalidUsage" in caplog.text


def test_a_failed_suspend_of_a_communicator_that_tells_nothing_is_tried_back(group: Any) -> None:
    backend, ours = Backend("ncclSystemError: lost", tells=False), Communicators(1)
    group(backend)
    ours.suspend("3")
    ours.resume()
    assert backend.calls == []


@pytest.mark.parametrize("by", ["variable", "option"])
def test_nonblocking_communicators_are_refused_by_name(
    group: Any, by: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    backend, ours = Backend(), Communicators(1)
    group(backend)
    if by == "variable":
        monkeypatch.setenv("TORCH_NCCL_USE_COMM_NONBLOCKING", "1")
    else:
        backend.options.config.blocking = 0
    for stop in "35":
        ours.suspend(stop)
    assert (backend.calls, caplog.text.count("1 communicators: they are non-blocking")) == ([], 1)


def test_the_measured_memory_counts_up_to_all_that_nccl_has() -> None:
    sizes = [(0, 5, 6), (0, 1, 3), (1, 4, 4)]
    assert communicators._freed(sizes, {0: 100, 1: 10}, {0: 108, 1: 500}) == {0: 8, 1: 4}
    assert communicators._freed(sizes, {0: 100}, {0: 90}) == {0: 6, 1: 4}
