"""Real ranks in step under the real agent: they pass boundaries that are no save points, and none of them hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_rig import Agent, until
from registered_job import registered
from test_agent_checkpoint import host  # noqa: F401 (a fixture)
from test_agent_link import Service, fact, service  # noqa: F401 (a fixture)

from cadenza.sidecar import orders

pytestmark = pytest.mark.slow

TERMS = {"timeout_s": 20.0, "save_s": 5.0, "hold_s": 0.0}


@contextmanager
def ranks(host: Agent, place: Path, kind: str) -> Iterator[None]:  # noqa: F811
    """Run two ranks of job 1; at the end they leave together."""
    pytest.importorskip("torch")
    (place / "kept").mkdir()
    jobs = []
    for rank in range(2):
        environment = {
            **os.environ, "CADENZA_SOCKET": str(host.socket), "SLURM_JOB_ID": "1", "RANK": str(rank),
            "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        }  # fmt: skip
        script = str(Path(__file__).with_name("save_point_rank.py"))
        words = map(str, (script, place / "meeting", place / "kept", kind, rank))
        command = registered(host.socket, 1, [0], sys.executable, *words)
        jobs.append(subprocess.Popen(command, env=environment))
    try:
        until(lambda: len(list(place.glob("up.*"))) == len(jobs), "both ranks to train", 60.0)
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def test_ranks_in_step_that_pass_a_boundary_together_or_alone_save_at_one_step(
    host: Agent, service: Service, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    with ranks(host, tmp_path, "one"):
        for order in range(1, 4):
            service.facts(fact(1))
            service.lease(1, lambda lease: lease.ready and lease.step > 5 and lease.checkpoints and not lease.saved)
            service.order(orders.CheckpointOrder, 1, **TERMS)
            done = service.wait_for(orders.Switched, lambda one: one.kind != "resume")
            assert done.kind == "checkpoint", done.note
            service.lease(1, lambda lease: lease.state == "held" and not lease.saved)
            saved = sorted(path.name for path in (tmp_path / "kept").iterdir())
            steps = {int(name.partition(".")[0]) for name in saved}
            assert len(saved) == 2 * len(steps) == 2 * order
            assert all(step % 4 == 0 for step in steps)


def test_an_order_without_a_save_point_is_given_back_in_words(
    host: Agent, service: Service, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    with ranks(host, tmp_path, "never"):
        service.facts(fact(1))
        service.lease(1, lambda lease: lease.ready and lease.step > 5 and lease.checkpoints)
        service.order(orders.CheckpointOrder, 1, **{**TERMS, "timeout_s": 0.5})
        done = service.wait_for(orders.Switched, lambda one: one.kind != "resume")
        assert done.kind == "timeout"
        assert "no save point: gradients are pending" in done.note
        service.lease(1, lambda lease: lease.state == "held" and not lease.refusals)
