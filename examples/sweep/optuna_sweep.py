#!/usr/bin/env python3
"""Let Optuna propose configurations and Cadenza run them: ask-and-tell in a few lines.

Run it where jobs are submitted: `python optuna_sweep.py --trials 40 -- --gres=gpu:1 --mem=4G --wrap='python train.py
--lr {lr} --decay {decay}'`. The same without a script of your own is `study = "sqlite:///…"` in sweep.toml.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import optuna
from optuna.trial import TrialState

from cadenza.slurm_plugin.sweep import Plan, Stop, Sweep


def ask(study: optuna.Study, sweep: Sweep) -> None:
    """Have the study propose one configuration and submit it."""
    trial = study.ask()
    lr = trial.suggest_float("lr", 1e-5, 2.0, log=True)
    decay = trial.suggest_float("decay", 1e-5, 0.1, log=True)
    sweep.ask({"lr": lr, "decay": decay}, key=trial.number)


def main() -> int:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("sweeps/optuna"))
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("words", nargs="+", help="sbatch options and script")
    options = parser.parse_args()
    study = optuna.create_study(direction="maximize")
    plan = Plan("optuna", top=2, stop=Stop("asha", first=20, least=4))
    with Sweep.create(options.dir, plan, options.words) as sweep:
        for _ in range(min(options.at_once, options.trials)):
            ask(study, sweep)
        for done in sweep.finished():
            value = done.best("max")
            if done.state == "done" and value is not None:
                study.tell(done.key, value)
            else:
                study.tell(done.key, state=TrialState.PRUNED if done.state == "stopped" else TrialState.FAIL)
            if len(sweep.trials) < options.trials:
                ask(study, sweep)
        best = sweep.best()
    if best is None:
        return 1
    print(f"best {best.best('max')} with {best.config}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
