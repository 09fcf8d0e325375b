"""Recording."""

from __future__ import annotations

import json

from gateway_rig import RECORDING

from cadenza.slurm_plugin.gateway.translate import snapshot


def test_the_recorded_answers_are_in_order_of_time() -> None:
    times = [snapshot(json.loads(line)).time_s for line in RECORDING.read_text().splitlines()]
    assert times == sorted(set(times))
