"""The runner of the rings: order, preparations, the first failure, and the table at the end."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import rings


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rings and preparations in the order in which they ran; the slow ring fails."""
    names: list[str] = []

    def run(ring: rings.Ring, times: Path) -> int:
        names.append(ring.name)
        times.write_text(json.dumps([[f"tests/{ring.name}.py::test_{n}", float(n)] for n in range(9)]))
        return 3 if ring is rings.SLOW else 0

    monkeypatch.setattr(rings, "run", run)
    monkeypatch.setattr(rings, "prepare", lambda name: names.append(name) or 0.0)
    return names


def test_the_first_ring_that_fails_is_the_last(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rings.py", "all"])
    assert rings.main() == 3
    assert [name for name in ran if name not in rings.PREPARATIONS] == [rings.FAST.name, rings.SLOW.name]
    lines = capsys.readouterr().out.splitlines()
    timed = [line.split("  ")[0] for line in lines if line.startswith("ring: ")]
    assert timed == ["ring: fast", "ring: slow"]
    assert sum("::test_" in line for line in lines) == rings.SLOWEST


def test_a_ring_without_its_preparation_does_not_begin(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str) -> float:
        raise subprocess.CalledProcessError(3, name)

    monkeypatch.setattr(rings, "prepare", prepare)
    monkeypatch.setattr("sys.argv", ["rings.py", "measure"])
    assert rings.main() == 3
    assert ran == []


def test_the_fast_ring_needs_no_preparation(ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rings.py", "fast"])
    assert rings.main() == 0
    assert ran == [rings.FAST.name]
