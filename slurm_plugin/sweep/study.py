"""An Optuna study as the source of a sweep's configurations, by its ask-and-tell interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cadenza.policies.core.errors import EnvironmentLacks, InputError
from cadenza.sidecar import clock
from cadenza.slurm_plugin.sweep.configs import Study
from cadenza.slurm_plugin.sweep.controller import Sweep
from cadenza.slurm_plugin.sweep.journal import TrialState

if TYPE_CHECKING:
    import optuna

DEFAULT_OPEN_TRIALS = 8
"""Open trials at a time; more would leave the sampler with too few results to learn from."""


class StudySource:
    """Feeds a sweep with a study's suggestions, and the study with the sweep's results."""

    def __init__(self, sweep: Sweep, study: Study) -> None:
        self.sweep, self._settings = sweep, study
        self._study = _open(study.storage, sweep)
        for trial in sweep.trials:
            if trial.ended:  # an earlier controller may have been killed before it told the study
                self._tell(trial)

    def ticks(self) -> Iterator[list[TrialState]]:
        """Yield the trials that ended in each pass, until all trials of the study have ended."""
        while True:
            for _ in range(self._room()):
                trial = self._study.ask()
                config = {name: _value(trial, name, entry) for name, entry in self._settings.space.items()}
                self.sweep.ask(config, key=trial.number)
            ended = self.sweep.tick()
            for done in ended:
                self._tell(done)
            yield ended
            if self.sweep.over and not self._room():
                return
            clock.sleep(self.sweep.plan.poll_s)

    def _room(self) -> int:
        """Return the number of configurations to ask the study for now."""
        state = self.sweep.state
        if state.target is not None or state.closed:
            return 0
        left = self._settings.trials - len(self.sweep.trials)
        return max(0, min(left, (self.sweep.plan.at_once or DEFAULT_OPEN_TRIALS) - len(self.sweep.live)))

    def _tell(self, trial: TrialState) -> None:
        """Tell the study a configuration's best value, or the values reported before its stop."""
        from optuna.trial import TrialState as Outcome  # noqa: PLC0415

        values = trial.values
        if trial.key is None:
            return
        if trial.state == "stopped" and values:
            self._report(trial)
            self._study.tell(trial.key, state=Outcome.PRUNED, skip_if_finished=True)
        elif trial.state == "done" and (best := trial.best(self.sweep.plan.goal)) is not None:
            self._study.tell(trial.key, best, skip_if_finished=True)
        else:
            self._study.tell(trial.key, state=Outcome.FAIL, skip_if_finished=True)

    def _report(self, trial: TrialState) -> None:
        import optuna  # noqa: PLC0415

        frozen = next(t for t in self._study.get_trials(deepcopy=False) if t.number == trial.key)
        if not frozen.state.is_finished():
            open_trial = optuna.trial.Trial(self._study, frozen._trial_id)  # noqa: SLF001 (continues an earlier trial)
            for step, value in trial.values:
                open_trial.report(value, step)


def _open(storage: str, sweep: Sweep) -> optuna.Study:
    try:
        import optuna  # noqa: PLC0415
    except ImportError:
        raise EnvironmentLacks("a study needs Optuna: pip install 'cadenza[sweep]'") from None
    direction = "maximize" if sweep.plan.goal == "max" else "minimize"
    try:
        return optuna.create_study(study_name=sweep.head.id, storage=storage, direction=direction, load_if_exists=True)
    except Exception as error:  # SQLAlchemy's, for any wrong address
        raise InputError(f"study = {storage!r}: {error}") from error


def _value(trial: optuna.Trial, name: str, entry: Any) -> Any:
    if isinstance(entry, list):
        return trial.suggest_categorical(name, entry)
    low, high, log = entry["low"], entry["high"], bool(entry.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, step=entry.get("step", 1), log=log)
    return trial.suggest_float(name, low, high, step=entry.get("step"), log=log)
