"""Tables on a terminal of 80 columns: names may be shortened, and no figure is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from cli_rig import cluster, job
from click.testing import CliRunner
from rich.console import Group, RenderableType

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import ClusterSnapshot, Gpu, Job, JobKey, Node
from cadenza.policies.core.profile import Profile, Reference
from cadenza.slurm_plugin.cli import whatif_command
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.cli.profile import show
from cadenza.slurm_plugin.cli.report_command import show as show_sharing
from cadenza.slurm_plugin.cli.simulate.output import as_table
from cadenza.slurm_plugin.cli.sweep import display
from cadenza.slurm_plugin.cli.watch import watch_output
from cadenza.slurm_plugin.report.sheet import Cell, Sheet, Table
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.store.reader import Round
from cadenza.slurm_plugin.simulations.request import read_request
from cadenza.slurm_plugin.simulations.runner import run_request
from cadenza.slurm_plugin.simulations.watch_view import HostRow, WaitingRow
from cadenza.slurm_plugin.sweep.controller import Head
from cadenza.slurm_plugin.sweep.journal import SweepState, TrialState
from cadenza.slurm_plugin.sweep.study_plan import Plan
from cadenza.slurm_plugin.terminal import Terminal
from cadenza.slurm_plugin.views import sharing_sheet
from cadenza.slurm_plugin.views import top_screen as render
from cadenza.slurm_plugin.views.cluster_view import Recent, build

FIGURE = re.compile(r"(?<![\w./=-])[-+±]?\d[\d,.]*\d(?![\w/])")
"""A number of two digits at least that is no part of a name."""


def shown(view: RenderableType, width: int) -> str:
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=width)
    out.print(view)
    return out.file.getvalue()  # type: ignore[attr-defined]


def top(_: Path) -> RenderableType:
    gpus = tuple(Gpu("gpu-a100-17", index) for index in range(8))

    def one(number: int, user: str, name: str, state: str | None) -> Job:
        found = replace(job(number % 2, name, state, user=user), key=JobKey(number, 12))  # type: ignore[arg-type]
        return replace(found, lease=found.lease and replace(found.lease, gpus=gpus, step=1_234_567, iteration_s=12.345))

    jobs = (
        one(12_345_678, "alexandra.smith", "llama-finetuning-stage-2", "held"),
        one(12_345_679, "bartholomew", "resnet50-ablation-17", "yielded"),
        one(12_345_680, "christopher", "x" * 100, None),
    )
    nodes = (Node("gpu-a100-17", "gpu-a100-17", 0, 64, 500_000, 8, "a100", ("gpu",)),)
    seen = ClusterSnapshot(1000.0, nodes, jobs, cluster().hosts)
    reasons = {one.key: "its turn ends: job 12345679 is next on gpu-a100-17:gpu0-7, after 1,234 s" for one in jobs}
    last = Round(123_456, 1000.0, seen, Memory(), Decision((), Memory(), reasons), Memory(), 0.1, "")
    was, now = "64 CPUs 512000 MB on gpu-a100-17", "96 CPUs 256000 MB on gpu-a100-17"
    effect = Effect(1, "tune", 12_345_678, 0, "a", 900.0, was, now, now, 1.55, 1.25, 0.75, 2.25, "kept", "as promised")
    return render.Screen(build(last, Recent(effects=(effect,)), 1002.0))


def sweep(_: Path) -> RenderableType:
    config = {"learning_rate": 0.00012345, "decay": 0.125, "optimizer": "adamw"}
    trials = {
        number: TrialState(
            number, config, job=12_345_678 + number, state=state, points={1_234_567: 0.91235},  # type: ignore[arg-type]
            stop_reason=f"exit code 137; slurm-{number}.out: error: the following arguments are required: --decay",
        )
        for number, state in enumerate(("live", "failed", "stopped"))
    }  # fmt: skip
    return display.table(Head("learning-rate-ab12", Plan("x"), [], ""), SweepState(trials))


def profile(_: Path) -> RenderableType:
    cpus, memory = tuple(range(1, 25)), tuple(20.83 * step for step in range(1, 13))
    rows = tuple(tuple(0.11 * at for at in range(1, 13)) for _ in cpus)
    one = Profile("llama-7b", 0.2, cpus, memory, rows, Reference(8, 24, 500))
    return Group(show.table(one), show.compared(show.rows([("profiles/of/some/folder.json", one), ("b.json", one)])))


def report(_: Path) -> RenderableType:
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    figures = (Cell("alexandra.smith"), Cell("1,234", 1), *(Cell("12.35", 12.35) for _ in sharing_sheet.FIGURES))
    table = Table(
        "users", "By user", (sharing_sheet.USER, sharing_sheet.Column("Jobs"), *sharing_sheet.FIGURES), (figures,)
    )
    show_sharing(Sheet("Effect", (), (), (table,), ()), "", out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("12.35") == len(sharing_sheet.FIGURES)
    return text


def simulate(_: Path) -> RenderableType:
    words = {"workload": "synergy:load=40,jobs=6", "nodes": "2x4:24:500", "seed": "1,2"}
    return as_table(run_request(read_request(words, ())))


def whatif(folder: Path) -> RenderableType:
    head = "JobIDRaw|User|Partition|State|Submit|Eligible|Start|End|Timelimit|AllocTRES|ReqTRES|NodeList"
    when = "2026-11-01T{:02}:{:02}:00".format
    rows = [
        f"{number}|ann|gpu|COMPLETED|{when(0, number)}|{when(0, number)}|{when(number, 0)}|{when(number + 2, 0)}|"
        "04:00:00|cpu=4,gres/gpu=2|cpu=4,gres/gpu=2|n1"
        for number in range(1, 9)
    ]
    (folder / "jobs.txt").write_text("\n".join((head, *rows)) + "\n")
    printed: list[RenderableType] = []
    words = ["whatif", "--sacct", f"{folder}/jobs.txt", "--nodes", "1x4:16:64", "--movable", "0.5"]
    words += ["-o", f"{folder}/figures.csv"]
    with patch.object(whatif_command, "console", lambda: SimpleNamespace(print=printed.append)):
        done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    return Group(*printed)


def watch(_: Path) -> RenderableType:
    waits = WaitingRow(12_345_678, "alexandra.smith" * 3, "gpu", 1024, 123_456.0, "QOSMaxGRESPerUser", fits=True)
    host = HostRow("gpu-a100-" + "x" * 60, 16, 12, 14, "has a job that has been ending for 1,234 s")
    return Group(watch_output._waiting_table([waits]), watch_output._host_table([host] * 12))


@pytest.mark.parametrize("view", [top, sweep, profile, report, simulate, whatif, watch])
def test_80_columns_cut_no_figure(view: Callable[[Path], RenderableType], tmp_path: Path) -> None:
    drawn = view(tmp_path)
    wide, narrow = shown(drawn, 400), shown(drawn, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    figures = FIGURE.findall(wide)
    assert len(figures) > 5
    assert [one for one in figures if one not in FIGURE.findall(narrow)] == [], narrow
