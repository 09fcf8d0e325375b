"""Kill processes at random points of a save, also two that save in one directory, and say what was restored each time.

``python tests/client/checkpoint_kills.py --kills 500`` prints the figures of docs/measurements. A process tells by a
pipe which save it begins and which is complete. A restore must find a state that was saved whole, its step must be at
least that of the last complete save, and the same as in the state.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from checkpoint_jobs import fork, wait
from torch import nn

from cadenza.sidecar.client.checkpoints import InUseError, checkpoint, ownership

SIZES = (64, 1 << 14, 1 << 20)
"""Numbers in the state: of 256 bytes, 64 KiB and 4 MiB."""
LONGEST_S = 0.06
TWO_WRITERS = 5
"""Each of so many kills is of one of two processes that save in the directory."""


def state(size: int, step: int, writer: int) -> tuple[nn.Module, dict[str, int]]:
    """Return a model and values that have the step and the process that saves it in all numbers."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.constant_(model.weight, float(step * 10 + writer))
    return model, {"step": step, "writer": writer}


def saves(place: Path, size: int, pipe: int, writer: int, *, background: bool) -> None:
    """Save one step after the other until this process is killed."""
    torch.set_num_threads(1)
    ownership.OTHER_WAIT_S = 0.0
    model, values = state(size, 0, writer)
    keeper = checkpoint(place, model=model, own={"values": values}, background=background)
    while True:
        try:
            step = keeper.restore() or 0
            break
        except InUseError:
            os.write(pipe, f"u {writer} 0\n".encode())
            time.sleep(0.002)
    while True:
        step += 1
        nn.init.constant_(model.weight, float(step * 10 + writer))
        values.update(step=step, writer=writer)
        os.write(pipe, f"b {writer} {step}\n".encode())
        keeper.save(step)
        if background:
            nn.init.constant_(model.weight, -1.0)
            keeper.wait()
        os.write(pipe, f"c {writer} {step}\n".encode())


def one_kill(place: Path, size: int, chance: random.Random, complete: int, *, two: bool) -> dict[str, int | str]:
    """Kill a process that saves, restore, and return what was found."""
    receives, sends = os.pipe()
    background = chance.random() < 0.5
    first = fork(lambda: saves(place, size, sends, 1, background=background))
    pids = [first, fork(lambda: saves(place, size, sends, 2, background=background))] if two else [first]
    os.close(sends)
    told = os.read(receives, 1 << 16)  # the first save begins
    time.sleep(chance.random() * LONGEST_S)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.random() * LONGEST_S / 4 if two else 0)
    wait(*pids)
    while piece := os.read(receives, 1 << 16):
        told += piece
    os.close(receives)
    lines = [line.split() for line in told.decode().splitlines()]
    begun = max((int(step) for kind, _, step in lines if kind == "b"), default=complete)
    done = max((int(step) for kind, _, step in lines if kind == "c"), default=complete)
    left = Counter(
        "unfinished" if path.name.endswith(".tmp") else "complete" if (path / "complete.json").exists() else "unmarked"
        for path in place.glob("step-*")
    )
    model, values = state(size, 0, 0)
    with checkpoint(place, model=model, own={"values": values}) as keeper:
        restored = int(keeper.restore() or 0)
    wanted = float(restored * 10 + values["writer"])
    whole = restored == 0 or (values["step"] == restored and bool((model.weight == wanted).all()))
    return {
        "complete": max(done, complete), "begun": begun, "restored": restored, "whole": int(whole),
        "kept_out": sum(kind == "u" for kind, _, _ in lines), "unfinished": left["unfinished"],
        "unmarked": left["unmarked"], "two": int(two),
    }  # fmt: skip


def run(folder: Path, kills: int, seed: int) -> dict[str, int]:
    """Kill so many processes; return how often something was wrong, and what the kills hit."""
    chance, complete = random.Random(seed), dict.fromkeys(SIZES, 0)  # noqa: S311
    found: Counter[str] = Counter(dict.fromkeys(("wrong", "older", "not_begun"), 0))
    for number in range(kills):
        size = chance.choice(SIZES)
        place = folder / str(size)
        one = one_kill(place, size, chance, complete[size], two=number % TWO_WRITERS == 0)
        found["kills"] += 1
        found["two writers"] += int(one["two"])
        found["second writer kept out"] += bool(one["kept_out"])
        found["wrong"] += not one["whole"]
        found["older"] += int(one["restored"]) < int(one["complete"])
        found["not_begun"] += int(one["restored"]) > int(one["begun"])
        found["in a save"] += bool(one["unfinished"] or one["unmarked"])
        found["the save was complete, and not told yet"] += int(one["restored"]) > int(one["complete"])
        complete[size] = int(one["restored"])
    return dict(found)


def main() -> int:
    """Run, print, and return 1 if any restore was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), options.kills, options.seed)
    print(json.dumps(found))
    return int(any(found[name] for name in ("wrong", "older", "not_begun")))


if __name__ == "__main__":
    sys.exit(main())
