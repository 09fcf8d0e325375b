"""A rank with NCCL yields once NCCL's watchdog has seen the end of all collectives: Slurm may stop it right after."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed
from client_peer import Peer, Turns

from cadenza.sidecar import client
from cadenza.sidecar.client.session import nccl_watchdog


@pytest.mark.parametrize(("backend", "waits"), [("gloo", False), ("cpu:gloo,cuda:nccl", True)])
def test_a_yield_waits_for_the_watchdogs_look(
    job: Peer, monkeypatch: pytest.MonkeyPatch, backend: str, waits: bool
) -> None:
    module = torch.distributed.distributed_c10d
    monkeypatch.setitem(module._pg_map, "group", (backend, None))
    synchronized: list[float] = []
    monkeypatch.setattr(nccl_watchdog, "_synchronize", lambda: synchronized.append(time.monotonic()))
    yielded: list[float] = []
    turns = Turns(job, [1], while_away=lambda _: yielded.append(time.monotonic()))
    client.attach(torch.nn.Linear(2, 2))
    client.boundary()
    turns.finish()
    assert len(synchronized) == waits
    if waits:
        assert yielded[0] - synchronized[0] > nccl_watchdog.LOOK_NS / 1e9
