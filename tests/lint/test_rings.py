"""The runner of the rings: order, preparations, the first failure, and the table at the end."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import IO

import pytest
import rings


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The rings and preparations in the order in which they ran; the slow ring fails."""
    names: list[str] = []

    def run(ring: rings.Ring, folder: Path, output: IO[str] | None) -> int:
        names.append(ring.name)
        times = [[f"tests/{ring.name}.py::test_{n}", float(n)] for n in range(9)]
        (folder / f"{ring.name}.json").write_text(json.dumps(times))
        while ring is rings.SLOW and rings.CLUSTER.name not in names:
            time.sleep(0.01)
        if ring is rings.CLUSTER:  # it runs beside the others until one of them has failed
            while not (folder / "stop").exists():
                time.sleep(0.01)
            assert output is not None
            output.write("the cluster's ring ends\n")
        return 3 if ring is rings.SLOW else 0

    monkeypatch.setattr(rings, "run", run)
    monkeypatch.setattr(rings, "prepare", lambda name: names.append(name) or 0.0)
    return names


def test_the_first_ring_that_fails_is_the_last_and_stops_the_one_beside_it(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["rings.py", "all"])
    assert rings.main() == 3
    assert set(ran) == {*rings.PREPARATIONS, rings.FAST.name, rings.SLOW.name, rings.CLUSTER.name}
    assert ran.index(rings.FAST.name) < ran.index(rings.SLOW.name)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "the cluster's ring ends"
    timed = {line.split("  ")[0] for line in lines if line.startswith("ring: ")}
    assert timed == {"ring: fast", "ring: slow", "ring: cluster"}
    assert sum("::test_" in line for line in lines) == rings.SLOWEST


def test_a_ring_stops_once_another_one_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    conftest = request.config.pluginmanager.get_plugin(str(rings.ROOT / "tests" / "conftest.py"))
    monkeypatch.setenv(rings.STOP, str(tmp_path / "stop"))
    conftest.pytest_runtest_setup()
    (tmp_path / "stop").touch()
    with pytest.raises(pytest.skip.Exception, match="another ring has failed"):
        conftest.pytest_runtest_setup()


def test_a_ring_collects_all_files_with_tests_of_its_marks() -> None:
    chosen = {
        name: rings.paths(ring) for name, ring in vars(rings).items() if isinstance(ring, rings.Ring) and ring.files
    }
    assert chosen.keys() == {"SLOW", "CLUSTER", "RELEASE", "SITES", "MEASURE"}
    assert all("tests/cluster/test_sites.py" in chosen[name] for name in ("CLUSTER", "RELEASE", "SITES"))
    assert "tests/report/test_report_browser.py" in chosen["SLOW"]
    own = set().union(*chosen.values(), ["tests/rings.py", "tests/cluster/conftest.py"])
    for path in (rings.ROOT / "tests").rglob("*.py"):
        if str(path.relative_to(rings.ROOT)) not in own:
            assert not re.search(r"mark\.(slow|browser|sites|measurement|cluster)\b", path.read_text()), path


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
