"""Optuna's ask-and-tell as the source of configurations, with the real Optuna."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_rig import FakeSlurm

from cadenza.slurm_plugin.sweep import Plan, Stop, Sweep
from cadenza.slurm_plugin.sweep.configs import Study
from cadenza.slurm_plugin.sweep.study import StudySource

optuna = pytest.importorskip("optuna")

SPACE = {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "layers": {"low": 1, "high": 3}, "opt": ["sgd", "adam"]}
PLAN = Plan("lr", goal="min", at_once=3, poll_s=0.001, slurm_s=1e-9, stop=Stop("none"))


def told(storage: str, sweep: Sweep) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=sweep.head.id, storage=storage).trials


@pytest.mark.slow
def test_a_study_is_asked_and_told_and_a_second_controller_goes_on(tmp_path: Path) -> None:
    storage, slurm = f"sqlite:///{tmp_path}/study.db", FakeSlurm()
    study = Study(storage, 5, SPACE)
    words = ["--wrap=train {lr} {layers} {opt}"]
    with Sweep.create(tmp_path / "s", PLAN, words, study=study, slurm=slurm) as sweep:
        ticks = StudySource(sweep, study).ticks()
        next(ticks)
        assert len(slurm.submitted) == 3
        slurm.report(0, (1, 0.5), (2, 0.25))
        slurm.end(100)
        slurm.report(1, (1, 0.75))
        sweep._stop(sweep.state.trials[1], "loses")
        for _ in range(3):
            next(ticks)
        assert told(storage, sweep)[0].value == 0.25
        assert told(storage, sweep)[1].state == optuna.trial.TrialState.PRUNED
        assert told(storage, sweep)[1].intermediate_values == {1: 0.75}
        assert len(slurm.submitted) == 5, "two have ended, so two more were asked for"
    for job in (102, 103, 104):
        slurm.report(job - 100, (1, 0.1))
        slurm.end(job, "FAILED" if job == 104 else "COMPLETED")
    with Sweep(tmp_path / "s", slurm) as again:
        list(StudySource(again, study).ticks())
        ends = [trial.state.name for trial in told(storage, again)]
        assert ends == ["COMPLETE", "PRUNED", "COMPLETE", "COMPLETE", "FAIL"]
        asked = {trial.number: trial.params for trial in told(storage, again)}
        assert {trial.key: trial.config for trial in again.trials} == asked


def test_the_python_interface_takes_any_asker(tmp_path: Path) -> None:
    slurm, study = FakeSlurm(), optuna.create_study(direction="minimize")
    with Sweep.create(tmp_path / "s", PLAN, ["--wrap=train {x}"], slurm=slurm) as sweep:
        for _ in range(3):
            trial = study.ask()
            sweep.ask({"x": trial.suggest_float("x", -1, 1)}, key=trial.number)
        sweep.tick()
        for trial in sweep.trials:
            slurm.report(trial.number, (1, trial.config["x"] ** 2))
            slurm.end(100 + trial.number)
        for done in sweep.finished():
            study.tell(done.key, done.best("min"))
    assert len(study.trials) == 3
    assert study.best_value == min(trial.params["x"] ** 2 for trial in study.trials)
