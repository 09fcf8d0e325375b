"""A sweep: configurations submitted as one multi-job, stopped by a rule, the best preferred.

It runs as the user, with the user's own Slurm commands; only ``slurm_commands`` calls them. The state is in the sweep's
directory, so another controller can continue after the first one was killed::

    from cadenza.slurm_plugin.sweep import Plan, Sweep

    sweep = Sweep.create(Path("sweeps/lr"), Plan("lr", goal="min"), ["--gres=gpu:1", "--mem=8G", "train.sh"])
    number = sweep.ask({"lr": 0.1})
    for trial in sweep.finished():  # as they end or are stopped
        print(trial.config, trial.best("min"))
"""

from __future__ import annotations

from cadenza.slurm_plugin.sweep.controller import Sweep
from cadenza.slurm_plugin.sweep.journal import TrialState
from cadenza.slurm_plugin.sweep.study_plan import Plan, Stop

__all__ = ["Plan", "Stop", "Sweep", "TrialState"]
