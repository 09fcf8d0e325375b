"""Recording and replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from gateway_rig import RECORDING, MakeGateway

from cadenza.policies.core.actions import Suspend
from cadenza.policies.core.model import JobKey
from cadenza.slurm_plugin.gateway.errors import RecordingError
from cadenza.slurm_plugin.gateway.recording import RecordedGateway, record


def test_a_replay_goes_on_with_its_last_answer() -> None:
    gateway = RecordedGateway(RECORDING)
    times = [gateway.read().time_s for _ in range(len(gateway) + 2)]
    assert times == sorted(times)
    assert len(set(times)) == len(gateway)


def test_actions_are_only_noted() -> None:
    gateway = RecordedGateway(RECORDING)
    action = Suspend(JobKey(32, 0), "r")
    assert gateway.apply(action).ok
    assert gateway.applied == [action]


def test_a_recording_replays_as_it_was_read(gateway_with: MakeGateway, tmp_path: Path) -> None:
    path = tmp_path / "cluster.jsonl"
    assert record(path, 2, 0.01, gateway_with()) == path.stat().st_size
    replayed = RecordedGateway(path)
    assert len(replayed) == 2
    assert [job.key.id for job in replayed.read().jobs] == [1, 2, 3, 5]


def test_a_recording_of_a_recording_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    original = RecordedGateway(RECORDING)
    record(path, len(original), 0, original)
    assert path.read_text() == RECORDING.read_text()


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "holds no answers"), ("{}\n{", ":1: schema None"), ("nonsense", ":1: not JSON"), ("[]", ":1: schema None")],
)
def test_what_is_no_recording_is_named(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "odd.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError) as refusal:
        RecordedGateway(path)
    assert str(path) in str(refusal.value)
    assert word in str(refusal.value)


def test_a_missing_recording_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="No such file"):
        RecordedGateway(tmp_path / "none")
