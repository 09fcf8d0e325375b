"""The command for the first GPU runs on the simulated one, and sees an engine that is broken."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import acceptance
import pytest
from rows import Unit, units

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "benchmarks" / "gpu" / "acceptance.py"
NEEDS_A_GPU = {
    "C a CUDA graph and a pool refuse by name",
    "C expandable segments leave the GPU",
    "C DDP and FSDP with one rank",
    "C torch.compile's CUDA graphs refuse by name",
    "C a graph behind gc.freeze() refuses",
    "C cudaMallocAsync refuses by name",
    "F mappings of managed memory",
    "F the driver's trial of doctor --gpu",
    "F NCCL's watchdog keeps a process from freezing",
    "R FSDP2 with 2 ranks in turns under an agent",
    "R DDP with 8 ranks in turns under an agent",
    "R FSDP2 with 8 ranks in turns under an agent",
    "R DDP and a second group with 8 ranks in turns under an agent",
    "R NCCL's memory is given back and comes back",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler to build the simulated GPU"),
]


def accepted(tmp_path: Path, *options: str, **environment: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run the command; return its exit status and its rows by name."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    out = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(COMMAND), "--simulated", "--json", str(out), *options],
        env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert result["passed"] == (done.returncode == 0), done.stdout
    return done.returncode, {row["name"]: row for row in result["rows"]}


@pytest.mark.parametrize(
    ("letters", "named", "more_than"),
    [
        (
            "A,B,C,D,G,H", "",
            {
                ("B speed of 8 MiB in tensors of 64 KiB", "survey_s"): 0,
                ("B the GPU is free after a yield", "held_MiB"): 12,
                ("H interrupts in the copy", "interrupts"): 4,
            },
        ),
        ("E,F", "", {("E two processes alternate on one GPU", "turns"): 3}),
        ("R", "DDP with", {("R DDP with 2 ranks in turns under an agent", "job1_away_MiB"): 10}),  # its buckets
    ],
)  # fmt: skip
def test_all_that_needs_no_gpu_passes_on_the_simulated_one(
    tmp_path: Path, letters: str, named: str, more_than: dict[tuple[str, str], float]
) -> None:
    """Left to the command itself: block P only measures, and a second group of ranks takes as long again."""
    code, rows = accepted(tmp_path, "--only", letters, "--rows", named)
    expected = {
        row
        for unit in units("simulated", long=False)
        for row in unit.rows
        if row[0] in letters.split(",") and named in row
    }
    assert (code, rows.keys()) == (0, expected)
    assert {name for name, row in rows.items() if row["outcome"] == "FAILED"} == set(), rows
    assert {name for name, row in rows.items() if row["outcome"] == "not run"} == NEEDS_A_GPU & expected
    figures = {(row, key): rows[row]["figures"][key] for row, key in more_than}
    assert {one for one, figure in figures.items() if figure <= more_than[one]} == set(), figures


def test_a_broken_engine_fails(tmp_path: Path) -> None:
    sys.path.append(str(ROOT / "tests" / "simulated"))
    import mutants  # noqa: PLC0415

    mutants.change(mutants.copied(tmp_path), "small storages do not come back")
    code, rows = accepted(tmp_path, "--only", "C", "--rows", "bit-identical", PYTHONPATH=str(tmp_path))
    (row,) = rows.values()
    assert (code, row["outcome"]) == (1, "FAILED")
    assert "differ" in row["why"]


def test_a_machine_without_a_gpu_is_no_failure_and_wrong_blocks_are_refused() -> None:
    pytest.importorskip("torch", reason="needs the extra `client`")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    codes = [
        subprocess.run([sys.executable, str(COMMAND), "--only", letters], env=environment, check=False).returncode
        for letters in ("A", "A,X")
    ]
    assert codes == [3, 2]


def test_a_machine_with_torch_alone_runs_all_but_the_agent(tmp_path: Path) -> None:
    for name in ("msgspec", "zmq", "psutil"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} here')")
    code, rows = accepted(tmp_path, "--only", "E,G", PYTHONPATH=str(tmp_path))
    assert code == 0
    assert {row["outcome"] for row in rows.values()} == {"not run"}
    assert "no msgspec here" in rows["E two processes alternate on one GPU"]["why"]


# --- which rows run, and what a cut leaves ------------------------------------------------------------------

MACHINE = {"device": "H100", "torch": "2.11.0+cu130"}
UNIT = Unit("x.py", ("B one",), 40, ("README.md",))


def results(folder: Path, outcome: str, commit: str, **machine: Any) -> None:
    rows = [{"name": "B one", "outcome": outcome, "why": "", "figures": {}, "seconds": 9.0}]
    found = {"machine": {**MACHINE, "commit": commit, **machine}, "rows": rows}
    (folder / f"{len(list(folder.iterdir()))}.json").write_text(json.dumps(found))


@pytest.mark.parametrize(
    ("outcome", "machine", "left"),
    [
        ("passed", {}, []),
        ("passed", {"torch": "2.11.1"}, []),
        ("passed", {"torch": "2.12.0"}, ["B one"]),
        ("passed", {"device": "A100"}, ["B one"]),
        ("passed", {"commit": ""}, ["B one"]),
        ("passed", {"commit": "0" * 40}, ["B one"]),
        ("passed", {"changed": True}, ["B one"]),
        ("FAILED", {}, ["B one"]),
        ("not run", {}, ["B one"]),
    ],
)
def test_rows_remain_that_never_passed_on_such_a_gpu(
    tmp_path: Path, outcome: str, machine: dict[str, Any], left: list[str]
) -> None:
    commit = acceptance.git("log", "-1", "--format=%H", "--", "README.md")
    if not acceptance.unchanged(commit, ["README.md"]):
        pytest.skip("needs git, and a README as it was committed")
    results(tmp_path, outcome, **{"commit": commit, **machine})
    (tmp_path / "other.json").write_text('{"rows": 3}')
    past = acceptance.past_results(tmp_path, {**MACHINE, "commit": "x"})
    assert acceptance.remaining(UNIT.rows, UNIT, past) == left


def test_a_row_whose_files_changed_since_it_passed_remains(tmp_path: Path) -> None:
    commits = acceptance.git("log", "-2", "--format=%H", "--", "CHANGELOG.md").splitlines()
    if len(commits) < 2:
        pytest.skip("needs git's history")
    results(tmp_path, "passed", commits[1])
    unit = Unit("x.py", ("B one",), 40, ("CHANGELOG.md",))
    assert acceptance.remaining(unit.rows, unit, acceptance.past_results(tmp_path, MACHINE)) == ["B one"]


def test_rows_that_never_ran_come_first_then_failed_ones_then_cheap_ones(tmp_path: Path) -> None:
    results(tmp_path, "FAILED", "")
    past = acceptance.past_results(tmp_path, MACHINE)
    past["B two"] = acceptance.Past(["passed"], [], 3.0)
    past["B three"] = acceptance.Past(["passed"], [], 2.0)
    names = ["B two", "B three", "B one", "B four"]
    found = sorted(names, key=lambda name: acceptance.urgency([name], UNIT, past))
    assert found == ["B four", "B one", "B three", "B two"]


def test_each_row_is_in_the_file_when_it_ends_and_a_hanging_one_costs_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "rows.py"
    script.write_text(
        "import json, os, sys, time\n"
        "for name in sys.argv[2:]:\n"
        "    if 'hangs' in name: time.sleep(600)\n"
        "    if 'dies' in name: sys.exit('it broke')\n"
        "    print(json.dumps(dict(name=name, outcome='passed', why='', figures={}, seconds=0.1)), flush=True)\n"
    )
    monkeypatch.setattr(acceptance, "__file__", str(script))
    table = acceptance.Table(tmp_path / "rows.json", dict(MACHINE))
    unit = Unit("rows.py", (), 2.0, ())
    written = []
    for rows in (["B ends", "B hangs", "B after"], ["B dies"], ["B last"]):
        acceptance.run(unit, rows, dict(os.environ), table)
        written.append(
            {row["name"]: row["outcome"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
        )
    assert written[0] == {"B ends": "passed", "B hangs": "FAILED", "B after": "FAILED"}
    assert written[2] == {**written[0], "B dies": "FAILED", "B last": "passed"}
    why = {row["name"]: row["why"] for row in table.rows}
    assert (why["B hangs"], why["B dies"]) == ("over 2 s", "its process ended with 1: it broke")
    assert "B last" in capsys.readouterr().out


def test_a_row_that_does_not_fit_the_budget_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr(acceptance, "run", lambda unit, rows, *_: ran.extend(rows))
    chosen = [(Unit("x.py", (name,), limit, ()), [name]) for name, limit in (("B short", 10), ("B long", 9000))]
    table = acceptance.Table(None, dict(MACHINE))
    options = type("Options", (), {"results": tmp_path, "budget": 100.0})
    acceptance.in_time(chosen, {}, table, options)
    assert ran == ["B short"]
    (row,) = table.rows
    assert (row["outcome"], "the budget leaves" in row["why"]) == ("not run", True)
