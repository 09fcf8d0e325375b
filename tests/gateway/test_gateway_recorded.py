"""Recording."""

from __future__ import annotations

import json
from pathlib import Path

from gateway_rig import RECORDING, MakeGateway

from cadenza.slurm_plugin.cli.site.recording import record
from cadenza.slurm_plugin.gateway.translate import snapshot


def test_a_recording_holds_the_answers_as_they_were_read(gateway_with: MakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "cluster.jsonl"
    assert record(path, 2, 0.01, gateway_with()) == path.stat().st_size
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(answers) == 2
    assert [job.key.id for job in snapshot(answers[0]).jobs] == [1, 2, 3, 5, 6]


def test_the_recorded_answers_are_in_order_of_time() -> None:
    times = [snapshot(json.loads(line)).time_s for line in RECORDING.read_text().splitlines()]
    assert times == sorted(set(times))
