"""The examples that save by their own framework's means: moved at any step, they end as if they had not been."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from client_peer import Peer
from test_checkpoint_requested import requested_by, send_on
from test_integrations_callbacks import example

from cadenza.sidecar import client

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "at", "taken", "batches"),
    [
        ("accelerate_checkpoints", 3, 4, 2),
        ("accelerate_checkpoints", 6, 7, 2),
        ("accelerate_checkpoints", 7, 9, 2),  # step 8 is the last one of an epoch: the schedule's step is to come
        ("dcp_train", 9, 10, 1),
    ],
)
def test_a_run_that_was_moved_ends_as_one_that_was_not(
    job: Peer, tmp_path: Path, name: str, at: int, taken: int, batches: int
) -> None:
    main = example(name).main
    finish = requested_by(job, at, then=send_on)
    whole = main(["--checkpoints", str(tmp_path)])
    said = finish()
    assert (said["step"], said["error"]) == (taken, "")
    client.detach()
    os.environ.pop("SLURM_JOB_ID")
    rest = main(["--checkpoints", str(tmp_path)])
    assert rest == {**whole, "losses": whole["losses"][taken * batches :]}
