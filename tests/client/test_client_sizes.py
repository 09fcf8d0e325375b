"""client.batch() and session.gpus: what a script that may run on another number of GPUs goes by."""

from __future__ import annotations

import pytest

from cadenza.sidecar import client
from cadenza.sidecar.client.errors import UsageError
from cadenza.sidecar.client.script_helpers import BATCH_ENV, batch
from cadenza.sidecar.client.session.job_session import Session


def ranks(size: int, **more: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(size), **more}


@pytest.mark.parametrize(("size", "mine"), [(1, 64), (2, 32), (4, 16)])
def test_the_whole_batch_stays_unless_chosen_otherwise(size: int, mine: int) -> None:
    assert batch(64, 1, ranks(size)) == batch(64, 1, ranks(size, **{BATCH_ENV: "global"})) == mine
    assert batch(64, 4, ranks(size)) == mine, "with how many GPUs it was meant changes nothing"
    assert batch(64, 1, ranks(size, **{BATCH_ENV: "per-gpu"})) == 64
    assert batch(64, 4, ranks(size, **{BATCH_ENV: "per-gpu"})) == 16


def test_a_batch_that_cannot_be_split_is_an_error() -> None:
    with pytest.raises(UsageError, match="batch of 64 cannot be split evenly over 3 GPUs"):
        batch(64, 1, ranks(3))
    with pytest.raises(UsageError, match="over 0 GPUs"):
        batch(64, 0, ranks(1, **{BATCH_ENV: "per-gpu"}))
    with pytest.raises(UsageError, match="CADENZA_BATCH must be global or per-gpu, not 'both'"):
        batch(64, 1, ranks(1, **{BATCH_ENV: "both"}))


def test_it_takes_the_process_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv(BATCH_ENV, raising=False)
    assert client.batch(64) == 32


def test_gpus_are_those_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert Session().gpus == 0
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,2-3", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert Session().gpus == 6
