"""A sweep from submission to its end, with Slurm's side in memory: killed, resumed, stopped, preferred."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from sweep_rig import FakeSlurm

from cadenza.policies.core.errors import InputError
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.errors import BusyError, SlurmUnavailable
from cadenza.slurm_plugin.sweep import Plan, Stop, Sweep
from cadenza.slurm_plugin.sweep.journal import read_state

WORDS = ["--gres=gpu:1", "--wrap=train --lr {lr}"]
CONFIGS = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
PLAN = Plan("lr", slurm_s=1e-9, stop=Stop("asha", first=10, least=4, reduction=2.0))


def create(tmp_path: Path, slurm: FakeSlurm, plan: Plan = PLAN, configs=CONFIGS) -> Sweep:
    return Sweep.create(tmp_path / "s", plan, WORDS, configs, slurm=slurm)


def states(sweep: Sweep) -> list[str]:
    return [trial.state for trial in sweep.trials]


def test_every_configuration_is_a_job_that_opts_in_and_knows_its_values(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
        assert [words for words, _ in slurm.submitted] == [
            ["--gres=gpu:1", f"--wrap=train --lr {config['lr']}"] for config in CONFIGS
        ]
        assert json.loads(slurm.submitted[2][1]["CADENZA_SWEEP_CONFIG"]) == {"lr": 0.3}
        assert json.loads(slurm.jobs[101].comment) == {"sweep": sweep.head.id, "cadenza": {"v": 1, "share": True}}


def test_losers_are_stopped_once_all_have_given_feedback(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
        for number in range(3):
            slurm.report(number, (5, 0.1), (10, 0.1 * number))
        sweep.tick()
        assert not slurm.cancelled
        slurm.report(3, (10, 0.9))
        sweep.tick()
        assert slurm.cancelled == [100, 101]
        ended = sweep.tick()
        assert [(trial.number, trial.state) for trial in ended] == [(0, "stopped"), (1, "stopped")]
        assert "best 1/2 of 4 at step 10" in ended[0].stop_reason
        slurm.end(102)
        slurm.end(103, "TIMEOUT")
        sweep.tick()
        assert states(sweep) == ["stopped", "stopped", "done", "failed"]
        assert sweep.over
        assert sweep.best().config == {"lr": 0.4}


def test_the_best_and_those_not_seen_yet_go_first(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    plan = Plan("lr", top=1, slurm_s=1e-9, stop=Stop("none", first=10))
    with create(tmp_path, slurm, plan) as sweep:
        sweep.tick()
        for number in range(3):
            slurm.report(number, (10, 0.1 * number))
        sweep.tick()
        assert [slurm.priority(job) for job in slurm.jobs] == [-1, -1, 0, 0]
        slurm.report(0, (20, 5.0))
        sweep.tick()
        assert [slurm.priority(job) for job in slurm.jobs] == [0, -1, -1, 0]


def test_a_comment_that_its_owner_has_changed_stays_and_the_sweep_says_so(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    plan = Plan("lr", top=1, slurm_s=1e-9, stop=Stop("none", first=10))
    mine = '{"cadenza":{"v":1,"share":true,"priority":5},"note":"mine"}'
    with create(tmp_path, slurm, plan) as sweep:
        sweep.tick()
        for number in range(3):
            slurm.report(number, (10, 0.1 * number))
        slurm.before_write = lambda: slurm.jobs.update({100: replace(slurm.jobs[100], comment=mine)})
        sweep.tick()
        assert slurm.jobs[100].comment == mine
        assert "configuration 0: its comment was changed" in sweep.notice
        assert slurm.priority(101) == -1
        slurm.before_write = None
        sweep.tick()
        assert json.loads(slurm.jobs[100].comment) == {
            "cadenza": {"v": 1, "share": True, "priority": 4}, "note": "mine", "behind": True,
        }  # fmt: skip
        assert not sweep.notice


@pytest.mark.parametrize("finish", [True, False])
def test_the_target_stops_all_others(tmp_path: Path, finish: bool) -> None:
    slurm = FakeSlurm()
    plan = Plan("lr", goal="min", target=0.5, at_once=3, finish=finish, slurm_s=1e-9)
    with create(tmp_path, slurm, plan) as sweep:
        sweep.tick()
        assert states(sweep) == ["live", "live", "live", "new"]
        slurm.report(1, (3, 0.5))
        for _ in range(2):
            sweep.tick()
        assert states(sweep) == ["stopped", "live" if finish else "stopped", "stopped", "stopped"]
        assert sweep.state.target["trial"] == 1


def test_a_killed_controller_loses_nothing(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    sweep = create(tmp_path, slurm)
    sweep.tick()
    for number in range(4):
        slurm.report(number, (10, 0.1 * number))
    with pytest.raises(BusyError):
        Sweep(tmp_path / "s", slurm)
    sweep.close()
    journal = tmp_path / "s" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    # Killed between sbatch and its record: the job is there, the journal only says that it was about to be.
    journal.write_bytes(b"".join(line for line in lines if b'"trial": 3, "job"' not in line) + b'{"kind": "li')
    with Sweep(tmp_path / "s", slurm) as again:
        assert states(again) == ["live", "live", "live", "submitting"]
        again.tick()
        assert len(slurm.submitted) == 4, "it is found again by its name, not submitted twice"
        assert slurm.cancelled == [100, 101], "what was reported meanwhile counts"
    assert read_state(tmp_path / "s").trials[3].job == 103


def test_a_target_that_was_reached_while_nobody_looked_counts(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm, Plan("lr", target=0.9, slurm_s=1e-9)) as sweep:
        sweep.tick()
    slurm.report(2, (7, 0.95))
    slurm.end(102)
    with Sweep(tmp_path / "s", slurm) as again:
        for _ in range(2):
            again.tick()
        assert again.state.target["trial"] == 2
        assert states(again) == ["stopped", "stopped", "done", "stopped"]


def test_stop_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm, Plan("lr", at_once=2, poll_s=0.001, slurm_s=1e-9)) as sweep:
        sweep.tick()
        sweep.stop()
        list(sweep.finished())
        assert states(sweep) == ["stopped"] * 4
        assert slurm.cancelled == [100, 101]
        assert len(slurm.submitted) == 2


@pytest.mark.parametrize("cut", range(1, 13))
def test_killed_after_any_record_it_ends_the_same(tmp_path: Path, cut: int) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
    journal = tmp_path / "s" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    kept = lines[: 4 + (cut % (len(lines) - 3))]
    journal.write_bytes(b"".join(kept))
    for job in [job for job, queued in slurm.jobs.items() if queued.name.split(".")[1] not in _begun(kept)]:
        del slurm.jobs[job]  # these were not submitted yet
    with Sweep(tmp_path / "s", slurm) as again:
        again.tick()
        assert states(again) == ["live"] * 4
        names = [queued.name for queued in slurm.jobs.values()]
        assert sorted(names) == sorted(set(names)), "no configuration has two jobs"


def _begun(lines: list[bytes]) -> set[str]:
    records = [json.loads(line) for line in lines]
    return {str(record["trial"]) for record in records if record["kind"] == "submitting"}


def test_slurm_may_be_away_but_not_from_the_start(tmp_path: Path) -> None:
    slurm = FakeSlurm(away=True)
    with create(tmp_path, slurm) as sweep:
        with pytest.raises(SlurmUnavailable):
            sweep.tick()
        slurm.away = False
        sweep.tick()
        for number in range(4):
            slurm.report(number, (10, 0.1 * number))
        slurm.away = True
        sweep.tick()
        assert "does not answer" in sweep.problem
        slurm.away = False
        sweep.tick()
        assert slurm.cancelled == [100, 101]
        assert not sweep.problem


def test_a_refused_submission_fails_that_configuration_alone(tmp_path: Path) -> None:
    slurm = FakeSlurm(refuse="--wrap=train --lr 0.2")
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
        assert states(sweep) == ["live", "failed", "live", "live"]
        assert "no such partition" in sweep.trials[1].stop_reason


def test_garbage_in_a_report_is_passed_over(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
        path = Path(slurm.submitted[0][1]["CADENZA_SWEEP_REPORT"])
        path.write_text('nonsense\n{"step": 1}\n[]\n{"step": 2, "value": NaN, "time_s": 0}\n{"step": 3, "value": 7')
        sweep.tick()
        assert list(sweep.trials[0].points) == [2]
        with path.open("a") as file:
            file.write('.5, "time_s": 1}\n')
        sweep.tick()
        assert sweep.trials[0].points[3] == 7.5
        assert sweep.best().number == 0


def quarter(trials, goal):
    """A user's rule."""
    assert goal == "min"
    assert all(value >= 0 for trial in trials for _, value in trial.points)
    return [trial.number for trial in trials if trial.config["lr"] < 0.15]


def test_a_users_function_decides(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    plan = Plan("lr", goal="min", slurm_s=1e-9, stop=Stop(f"{__name__}:quarter"))
    with create(tmp_path, slurm, plan) as sweep:
        sweep.tick()
        for number in range(4):
            slurm.report(number, (1, 1.0 - 0.1 * number))
        sweep.tick()
        assert slurm.cancelled == [100]


def broken(trials, goal):
    """A user's rule with a mistake."""
    return trials[0].nothing


def test_a_users_mistake_is_named_and_costs_no_job(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    plan = Plan("lr", slurm_s=1e-9, stop=Stop(f"{__name__}:broken"))
    with create(tmp_path, slurm, plan) as sweep, pytest.raises(InputError, match=r"broken.*AttributeError"):
        sweep.tick()
    assert not slurm.cancelled


def test_status_reads_without_control(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        none = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "s")])
        assert "no configuration has reported a value" in none.stdout
        sweep.tick()
        slurm.report(2, (4, 0.25))
        done = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "s"), "--json"])
        found = json.loads(done.stdout)
        assert found["best"]["config"] == {"lr": 0.3}
        assert found["trials"][2]["step"] == 4
        shown = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "s")]).stdout
        assert "best: configuration 2 (job 102): 0.25 with lr=0.3" in shown
    wrong = CliRunner().invoke(main, ["sweep", "status", str(tmp_path)])
    assert wrong.exit_code == 2
    assert "sweep.json" in wrong.stderr


@pytest.mark.parametrize(
    ("facts", "written", "said"),
    [
        ("ExitCode=2:0", "usage: x\n\nsw.py: error: --decay missing\nsrun: error: node1: task 0: Exited\n",
         "exit code 2; slurm-17.out: usage: x | sw.py: error: --decay missing"),
        ("ExitCode=0:9", "a\x1b[2J\n", "signal 9; slurm-17.out: a\ufffd[2J"),
        ("ExitCode=1:0", None, "exit code 1; slurm-17.out: No such file or directory"),
    ],
)  # fmt: skip
def test_a_failed_configuration_shows_its_own_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: str, written: str | None, said: str
) -> None:
    log = tmp_path / "slurm-17.out"
    if written is not None:
        log.write_text(written)
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '   JobState=FAILED {facts}'\necho '   StdOut={log}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    slurm = FakeSlurm()
    with create(tmp_path, slurm) as sweep:
        sweep.tick()
        slurm.end(100, "FAILED")
        (ended,) = sweep.tick()
    assert (ended.state, ended.stop_reason) == ("failed", said)
    shown = CliRunner().invoke(main, ["sweep", "status", str(tmp_path / "s"), "--json"]).stdout
    assert json.loads(shown)["trials"][0]["why"] == said
