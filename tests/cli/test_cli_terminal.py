"""Names, notes and reasons from outside on the terminal: every view prints them as text and nothing else."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_rig import cluster, job, write_config
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from rich.panel import Panel
from rich.text import Text as RichText

import cadenza.slurm_plugin.cli
from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.errors import InputError
from cadenza.policies.core.model import Gpu, Job, JobKey, Lease
from cadenza.policies.core.profile import Profile
from cadenza.sidecar.client.bootstrap import run_script
from cadenza.slurm_plugin.cli import common
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.cli.profile import show
from cadenza.slurm_plugin.cli.report_command import show as show_report
from cadenza.slurm_plugin.cli.sweep import display
from cadenza.slurm_plugin.report.sheet import Cell, Column, Sheet, Table
from cadenza.slurm_plugin.service.accounting.effects import Effect
from cadenza.slurm_plugin.service.agents.agent_registry import Event
from cadenza.slurm_plugin.service.store.reader import ActionRow, JobRecord, Round, SwitchRow
from cadenza.slurm_plugin.site import checks
from cadenza.slurm_plugin.site.checks import Finding
from cadenza.slurm_plugin.sweep.journal import TrialState
from cadenza.slurm_plugin.terminal import Terminal
from cadenza.slurm_plugin.views import job_sentences as why
from cadenza.slurm_plugin.views import top_screen as render
from cadenza.slurm_plugin.views.cluster_view import Recent, TopView, build

CONTROLS = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))
BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\u2028\u2029"
HOSTILE = (
    CONTROLS, BIDI, "[/]", "[link=https://x.example]here[/link]", "\x1b]0;title\x07", "\x1b[2J\x1b[31mred", "\x9b2J",
    "a\nb", ":bomb:", "\ud800",
)  # fmt: skip
STYLES = re.compile(r"\x1b\[[0-9;]*m")
"""Select Graphic Rendition (ECMA-48): all that rich writes for colors and weights."""
OBEYED = re.compile(f"[{re.escape(CONTROLS.replace(chr(10), ''))}{BIDI}\ud800-\udfff]")


def printed(draw: Callable[[Terminal], object]) -> str:
    """Return what a view writes to a terminal, without the styles of the program."""
    out = Terminal(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    draw(out)
    return STYLES.sub("", out.file.getvalue())  # type: ignore[attr-defined]


def harmless(text: str) -> None:
    found = OBEYED.search(text)
    assert found is None, f"{found[0]!r} in {text!r}"


def bad_job(name: str) -> Job:
    lease = Lease("yielded", (Gpu("n1", 0),), why_not_ready=name, requeue_owner=name, lost=name)
    texts = {"user": name, "partition": name, "state_reason": name, "profile_note": name, "nodes": ("n1",)}
    return replace(job(1, name, "held", **texts), lease=lease)


def bad_effect(name: str) -> Effect:
    return Effect(1, "tune", 1, 0, name, 0.0, name, name, name, 1.5, 1.0, 0.5, 2.0, "undone", name)


def bad_view(name: str) -> TopView:
    bad = bad_job(name)
    jobs = (bad, replace(bad, key=JobKey(2, 0), lease=None, unmanageable=name))
    decision = Decision((), Memory(), {JobKey(1, 0): name})
    last = Round(1, 0.0, cluster(*jobs), Memory(), decision, Memory(), 0.1, "")
    return build(last, Recent(effects=(bad_effect(name),)), 1.0)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_top_prints_text_only(name: str) -> None:
    lines = printed(lambda out: out.print(render.Screen(bad_view(name)))).splitlines()
    harmless("\n".join(lines))
    plain = printed(lambda out: out.print(render.Screen(bad_view("x" * len(name)))))
    assert abs(len(lines) - len(plain.splitlines())) <= 2, "words wrap elsewhere, and nothing else ends a line"
    assert not name.startswith("[/]") or any("[/]" in line for line in lines), "markup is text"


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_why_prints_one_line_for_each_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def record(name: str) -> JobRecord:
        action = ActionRow(1, 0.0, "Yield", 1, 0, None, name, True, "", False, name, None)
        switch = SwitchRow(0.0, name, 1, 0, "yield", 0.1, 0.1, 0.2, 3, None, name)
        event = Event(0.0, "note", name, 1, 0, name)
        return JobRecord(1, name, 0.0, bad_job(name), (action,), (switch,), (event,), (bad_effect(name),))

    said = []
    for text in (name, "train"):
        common.say(*why.lines(record(text)))
        said.append(capsys.readouterr().out)
    harmless(said[0])
    assert said[0].count("\n") == said[1].count("\n")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_reports_sweeps_and_profiles_print_text_only(name: str) -> None:
    table = Table("users", name, (Column(name, name, text=True),), ((Cell(name),),))
    trial = TrialState(1, {name: name}, stop_reason=name, state="failed")
    head = SimpleNamespace(id=name, plan=SimpleNamespace(goal="max"))
    state = SimpleNamespace(trials={1: trial})
    profile = Profile(name, 0.1, (1.0,), (10.0,), ((1.0,),), gpu=name)
    for text in (
        printed(lambda out: show_report(Sheet(name, (name,), (), (table,), (name,)), name, out)),
        printed(lambda out: out.print(display.table(head, state, problem=name))),  # type: ignore[arg-type]
        printed(lambda out: out.print(show.table(profile))),
    ):
        harmless(text)


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_doctor_errors_and_json_print_text_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checks, "examine", lambda _: (Finding("WARN", name, name, name),))
    doctor = CliRunner().invoke(main, ["doctor", "--config", str(write_config(tmp_path))])
    harmless(doctor.output)
    assert (doctor.output.count("\n"), doctor.output.splitlines()[-1]) == (3, "0 problems, 1 warning")

    def fail(*_: object, **__: object) -> None:
        raise InputError(name)

    monkeypatch.setattr("cadenza.slurm_plugin.cli.jobs.why.store_or_socket", fail)
    failed = CliRunner().invoke(main, ["why", "1"])
    harmless(failed.output)
    assert failed.output.count("\n") == 1
    if name != "\ud800":  # JSON cannot hold it
        common.emit("cadenza.why/1", {"name": name})
        said = capsys.readouterr().out
        harmless(said)
        assert json.loads(said) == {"schema": "cadenza.why/1", "name": name}


@given(st.text())
def test_no_text_reaches_the_terminal_as_a_control(text: str) -> None:
    harmless(printed(lambda out: out.print(text, RichText(text), Panel(text, title=text))))


def test_every_command_prints_through_these_functions() -> None:
    """``click.echo`` writes text as it is: only the functions that clean it, and texts of ours alone, may call it."""
    folder = Path(cadenza.slurm_plugin.cli.__path__[0])
    echoes = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py")
        if re.search(r"click\.echo\(|\bprint\(|\bConsole\(", path.read_text(encoding="utf-8").replace(".print(", ""))
    }  # fmt: skip
    assert echoes == {"common.py", "reference.py"}


def test_the_help_of_run_names_each_of_its_options() -> None:
    text = CliRunner().invoke(main, ["run", "--help"]).output
    assert [option for option in run_script.OPTIONS if option not in text] == []
