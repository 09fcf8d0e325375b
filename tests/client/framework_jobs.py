"""Runs the examples of the frameworks in one process: unchanged, with their lines of Cadenza, and left alone.

Prints one JSON object a run: its name, its result, and how often the job yielded in it by its intruder's visits.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cadenza.sidecar import client
from cadenza.sidecar.client.bootstrap.process import current

Example = Callable[[list[str]], dict[str, Any]]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/frameworks"
RUNS = {"lightning_train": "--no-callback", "hf_trainer": "--no-callback", "accelerate_train": "--no-attach"}
STEPS = {"lightning_train": 24, "hf_trainer": 16, "accelerate_train": 64}


def load(name: str) -> Example:
    """Return one example's main; importing its frameworks takes a minute from a cold disk."""
    example: Example = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name=name)["main"]
    return example


def run(example: Example, *flags: str) -> dict[str, Any]:
    """Run one example with these flags."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return example(list(flags))


def handlers() -> list[object]:
    """Return this process's signal handlers."""
    return [signal.getsignal(number) for number in sorted(signal.valid_signals())]


def main(visits: Path) -> None:
    torch.set_num_threads(1)
    examples = {name: load(name) for name in RUNS}  # before the job attaches: no boundary comes during an import
    for kind in ("unchanged", "callback", "alone"):
        if kind == "alone":
            del os.environ["SLURM_JOB_ID"]
        for name, flag in RUNS.items():
            before, ways = len(visits.read_text()), handlers()
            result = run(examples[name], f"--steps={STEPS[name]}", *([] if kind == "callback" else [flag]))
            yields = len(visits.read_text()) - before
            same = handlers() == ways
            left = current() is None
            print(json.dumps({"run": [kind, name], "yields": yields, "handlers": same, "left": left, **result}))
            sys.stdout.flush()
            if kind == "callback" or name == "accelerate_train":  # the last one of its kind
                client.detach()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
