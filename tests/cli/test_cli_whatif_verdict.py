"""The verdict of a what-if: what it says, what it rests on, and when there is none."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cadenza.slurm_plugin.cli.main import main

pytestmark = pytest.mark.slow
HEAD = "JobIDRaw|User|Account|QOS|Partition|Submit|Start|End|Eligible|TimelimitRaw|Suspended|AllocTRES|ReqTRES"
HOUR = 3600


def row(job: int, times: tuple[int, int, int], gpus: int = 1, user: str = "ada", account: str = "a") -> str:
    submit, start, end = (1_000_000 + at for at in times)
    tres = f"cpu=1,gres/gpu={gpus},mem={gpus}G"
    qos = "high" if job % 3 == 0 else "normal"
    return f"{job}|{user}|{account}|{qos}|gpu|{submit}|{start}|{end}|{submit}|600|00:00:00|{tres}|{tres}"


def rows(jobs: int = 104, late_s: int = 0) -> list[str]:
    """Long wide jobs, and short ones behind them that waited for their ends, as in Slurm, or for longer."""
    found = [row(n, (n, 10_000 * (n - 1), 10_000 * n), 4, "wide", "b") for n in range(1, 5)]
    for n in range(jobs - len(found)):
        start = 40_000 + 60 * (n // 4) + late_s
        found.append(
            row(5 + n, (100 + n, start, start + 60), user="=cmd()" if n == 0 else f"u{n % 20}", account="ac"[n % 2])
        )
    return found


def whatif(folder: Path, lines: list[str], *words: str, code: int = 0) -> Result:
    (folder / "jobs.txt").write_text("\n".join((HEAD, *lines)) + "\n")
    given = ["whatif", "--quiet", "--sacct", str(folder / "jobs.txt"), "--nodes", "1x4:16:64", *words]
    result = CliRunner().invoke(main, given)
    assert result.exit_code == code, result.output
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("verdict")
    words = ("--movable", "0.25,0.5", "--users", "0.1,0.5", "-o", str(folder / "page.html"), "-o",
             str(folder / "figures.csv"), "--json")  # fmt: skip
    return folder, json.loads(whatif(folder, rows(), *words).stdout)


def test_the_verdict_says_gain_price_break_even_who_and_what_it_rests_on(found):
    verdict = found[1]["verdict"]
    gain, parts, price, who, base = verdict["text"]
    assert not verdict["refused"]
    assert re.match(
        r"With half of the jobs keeping checkpoints: mean wait \d+\.\d h → [\d.]+ (h|min), completion time .\d", gain
    )
    assert re.search(r"worth it at 25 %|not worth it", gain)
    assert "tried: 25, 50" in parts
    assert "of the users who opt in with all jobs (tried: 10, 50)" in parts
    assert "95 % interval over the draws" in parts
    assert re.match(
        r"Today [\d,]+ GPU hours .* are idle beside waiting jobs that would fit; then .* moves cost ", price
    )
    assert re.match(r"Completion time by accounts: [ac] .* to [ac] .*; QOS: ", who)
    assert re.match(r"The simulated Slurm has jobs wait \d+\.\d h on average, they really waited \d+\.\d h", base)
    assert abs(verdict["error"]) < 0.02
    halves = {(one["users"], one["part"]): one["half"] for one in verdict["parts"]}
    assert halves.pop((False, 0.5)) > 0
    assert set(halves.values()) == {None}, "only the main part is drawn several times"


def test_the_page_has_the_verdict_first_and_draws_nothing_that_is_not_known(found):
    text = (found[0] / "page.html").read_text()
    assert text.index('id="verdict"') < text.index('id="summary"')
    assert "Completion time by account" in text
    assert "Completion time by QOS" in text
    assert "Completion time by user: 12 of 22 users, those with most jobs" in text
    cpus = text[text.index('id="chart-cpus"') :].partition("</figure>")[0]
    assert "50 % can move" in cpus
    assert "as it was" not in cpus
    assert "Decision" not in text
    assert text.count("cadenza whatif --sacct=") == 1, "one command made all results"
    assert '<body class="unsure">' not in text


def test_the_figures_are_a_table_with_one_unit_a_row_and_no_formulas(found):
    lines = list(csv.reader((found[0] / "figures.csv").open()))
    assert lines[0][:5] == ["table", "row", "unit", "slurm", "slurm +-"]
    assert {len(line) for line in lines} == {len(lines[0])}
    waits = next(line for line in lines if line[1] == "wait_1_gpu_h")
    assert waits[2] == "h"
    assert float(waits[3]) > 1
    assert ["completion time by user", "'=cmd()"] in [line[:2] for line in lines]


def test_at_80_columns_no_figure_is_cut_and_the_verdict_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("cadenza.slurm_plugin.cli.common.PIPE_WIDTH", 80)
    text = whatif(tmp_path, rows(), "--draws", "1", "-o", str(tmp_path / "f.csv")).output
    assert "…" not in text
    assert max(map(len, text.splitlines()[:-1])) <= 80
    assert re.search(r"was +slurm +easy +10 % +25 % +50 % +100 %\n", text)
    assert "One draw of the jobs that keep checkpoints" in " ".join(text.split())


def test_a_cause_that_the_verdict_names_is_not_said_again_below(tmp_path):
    words = ("--movable", "1", "-o", str(tmp_path / "figures.csv"))
    text = " ".join(whatif(tmp_path, rows(104, 60 * HOUR), *words).stdout.split())
    assert text.count("Rules of the site that are not known") == 1


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (rows(40), "Not usable yet: a verdict needs 100 jobs that ended, and there are 40."),
        (
            rows(104, 60 * HOUR),
            r"No verdict: the simulated Slurm has jobs wait \d\d\.\d h .*, they really waited 6.* 30 % apart\.$",
        ),
    ],
)  # fmt: skip
def test_without_a_basis_there_is_no_verdict_and_the_cause_is_named(tmp_path, lines, why):
    page = tmp_path / "page.html"
    words = ("--movable", "1", "-o", str(tmp_path / "figures.csv"), "-o", str(page), "--json")
    verdict = json.loads(whatif(tmp_path, lines, *words).stdout)["verdict"]
    assert verdict["refused"]
    assert re.match(why, verdict["text"][0]), verdict["text"]
    idle = re.match(r"In \d\d % of their waiting as many GPUs were idle .* Rules of the site that", verdict["text"][1])
    assert bool(idle) == (len(lines) > 100)
    assert '<body class="unsure">' in page.read_text()
    assert ".unsure :is(.better, .worse) .word { display: none; }" in page.read_text(), (
        "nothing is called better or worse"
    )


def test_where_nobody_waits_there_is_nothing_to_gain(tmp_path):
    lines = [row(n, (400 * n, 400 * n, 400 * n + 300)) for n in range(1, 121)]
    text = whatif(tmp_path, lines, "--movable", "0.5", "--draws", "1", "-o", str(tmp_path / "f.csv")).output
    assert "Nothing to gain: jobs wait for" in text


def test_an_array_of_slurm_runs_the_simulations_and_missing_ones_again(tmp_path, monkeypatch):
    # sbatch runs the tasks at once, and squeue knows no job of it any more.
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "squeue").write_text("#!/bin/sh\nexit 0\n")
    (commands / "sbatch").write_text(
        '#!/bin/sh\necho "$@" >> sbatch.txt\nfor script; do :; done\n'
        "for task in $(echo \"$*\" | sed 's/.*--array=\\([0-9,]*\\).*/\\1/' | tr , ' '); do\n"
        'SLURM_ARRAY_TASK_ID=$task sh "$script" || exit 1; done\necho 17\n'
    )
    for file in commands.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    folder = tmp_path / "array"
    words = ("--movable", "0.5", "--draws", "1", "-o", str(tmp_path / "figures.csv"))
    alone = whatif(tmp_path, rows(), *words).output
    said = whatif(tmp_path, rows(), *words, "--array", str(folder)).output
    assert said.startswith("0 of 2 simulations are over; job 17 runs 2; once it is over the same command")
    (folder / "result-1.json.gz").unlink()
    said = whatif(tmp_path, rows(), *words, "--array", str(folder)).output
    assert "1 of 2 simulations are over; job 17 runs 1; " in said
    assert "log-1.txt says why" in said
    assert [line.split("--array=")[1].split()[0] for line in (folder / "sbatch.txt").open()] == ["0,1", "1"]
    assert whatif(tmp_path, rows(), *words, "--array", str(folder)).output == alone
    # Spoilt files are named: a result that was cut off, of another kind or not packed, and the job's number.
    whole = (folder / "result-1.json.gz").read_bytes()
    for spoilt in (whole[:40], whole[:10] + b"\xff" * 40, gzip.compress(b"[]"), b"no gzip"):
        (folder / "result-1.json.gz").write_bytes(spoilt)
        refused = whatif(tmp_path, rows(), *words, "--array", str(folder), code=2).output
        assert refused.startswith("cadenza: ")
        assert "result-1.json.gz: " in refused
    (folder / "result-1.json.gz").unlink()
    (folder / "job").write_text("seventeen\n")
    refused = whatif(tmp_path, rows(), *words, "--array", str(folder), code=2).output
    assert refused.endswith("/job: it is not the number of a job\n")
    other = CliRunner().invoke(main, ["whatif", "--sacct", str(tmp_path / "jobs.txt"), "--nodes", "1x8:16:64",
                                      "--array", str(folder)])  # fmt: skip
    assert (other.exit_code, other.output.count("has another what-if")) == (2, 1)
