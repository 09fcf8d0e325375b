"""An Optuna study as the source of a sweep's configurations: asked for each, told how it ended (ask-and-tell)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cadenza.sidecar import clock
from cadenza.slurm_plugin.sweep.configs import Config, Study
from cadenza.slurm_plugin.sweep.controller import Sweep
from cadenza.slurm_plugin.sweep.errors import EnvironmentLacks, InputError

if TYPE_CHECKING:
    import optuna

    from cadenza.slurm_plugin.sweep.journal import TrialState

AT_ONCE = 8
"""A sampler learns from what has ended, so not all are asked for at once."""


class Asked:
    """A sweep whose configurations a study makes."""

    def __init__(self, sweep: Sweep, study: Study) -> None:
        self.sweep, self._wish = sweep, study
        self._study = _open(study.storage, sweep)
        for trial in sweep.trials:
            if trial.ended:  # its controller may have been killed before it told so
                self._tell(trial)

    def ticks(self) -> Iterator[list[TrialState]]:
        """Yield the trials that ended at each look, until all that the study was to make have."""
        while True:
            self._ask()
            ended = self.sweep.tick()
            for trial in ended:
                self._tell(trial)
            yield ended
            if self.sweep.over and not self._room():
                return
            clock.sleep(self.sweep.plan.poll_s)

    def _room(self) -> int:
        """Return for how many more configurations the study is to be asked now."""
        book = self.sweep.book
        if book.target is not None or book.closed:
            return 0
        left = self._wish.trials - len(self.sweep.trials)
        return max(0, min(left, (self.sweep.plan.at_once or AT_ONCE) - len(self.sweep.live)))

    def _ask(self) -> None:
        for _ in range(self._room()):
            trial = self._study.ask()
            self.sweep.ask(_suggest(trial, self._wish.space), key=trial.number)

    def _tell(self, trial: TrialState) -> None:
        """Tell how a configuration did: its best value, or what it reported until it was stopped."""
        from optuna.trial import TrialState as Told  # noqa: PLC0415

        values = trial.values
        if trial.key is None:
            return
        if trial.state == "stopped" and values:
            self._report(trial)
            self._study.tell(trial.key, state=Told.PRUNED, skip_if_finished=True)
        elif trial.state == "done" and (best := trial.best(self.sweep.plan.goal)) is not None:
            self._study.tell(trial.key, best, skip_if_finished=True)
        else:
            self._study.tell(trial.key, state=Told.FAIL, skip_if_finished=True)

    def _report(self, trial: TrialState) -> None:
        import optuna  # noqa: PLC0415

        found = next(t for t in self._study.get_trials(deepcopy=False) if t.number == trial.key)
        if not found.state.is_finished():
            known = optuna.trial.Trial(self._study, found._trial_id)  # noqa: SLF001 (the way to go on with one asked earlier)
            for step, value in trial.values:
                known.report(value, step)


def _open(storage: str, sweep: Sweep) -> optuna.Study:
    try:
        import optuna  # noqa: PLC0415
    except ImportError:
        raise EnvironmentLacks("a study needs Optuna: pip install 'cadenza[sweep]'") from None
    direction = "maximize" if sweep.plan.goal == "max" else "minimize"
    try:
        return optuna.create_study(study_name=sweep.head.id, storage=storage, direction=direction, load_if_exists=True)
    except Exception as error:  # SQLAlchemy's, for whatever is wrong with an address
        raise InputError(f"study = {storage!r}: {error}") from error


def _suggest(trial: optuna.Trial, space: dict[str, Any]) -> Config:
    return {name: _value(trial, name, entry) for name, entry in space.items()}


def _value(trial: optuna.Trial, name: str, entry: Any) -> Any:
    if isinstance(entry, list):
        return trial.suggest_categorical(name, entry)
    low, high, log = entry["low"], entry["high"], bool(entry.get("log"))
    if isinstance(low, int) and isinstance(high, int):
        return trial.suggest_int(name, low, high, step=entry.get("step", 1), log=log)
    return trial.suggest_float(name, low, high, step=entry.get("step"), log=log)
