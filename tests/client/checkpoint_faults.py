"""Processes that are killed, or run out of disk, while they save; forked from this one, which imports torch once.

``python checkpoint_faults.py FOLDER`` writes what was found afterwards as JSON into ``FOLDER/found.json``.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_jobs import fork, wait
from torch import nn

from cadenza.sidecar.client.checkpoints import SaveError, checkpoint

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")
"""Audit events of a save, except writes and fsync (docs.python.org, "Audit events table")."""
LARGE = 48 << 20
PATIENCE_S = 60


def keeper(place: Path, step: int, *, size: int = 8) -> Any:
    """Return a checkpoint whose model holds the step."""
    model = nn.Linear(size, 1, bias=False)
    nn.init.constant_(model.weight, float(step))
    return checkpoint(place, model=model, own={"model": {"step": step}}), model


def save(place: Path, step: int, *, size: int = 8) -> None:
    """Save a step."""
    with keeper(place, step, size=size)[0] as saved:
        saved.save(step)


def restored(place: Path, *, size: int = 8) -> int | None:
    """Return the step that is restored, checked against the model's values."""
    saved, model = keeper(place, 0, size=size)
    with saved:
        step: int | None = saved.restore()
    assert bool((model.weight == float(step or 0)).all())
    return step


def save_killed(place: Path, step: int, at: int) -> None:
    """Save, and kill this process before its n-th change of a directory or opening of a file."""
    left = [at]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and str(place) in str(arguments[0]):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    save(place, step)


def killed_everywhere(folder: Path) -> list[dict[str, Any]]:
    """Kill a save at each point, then restore, save once more, and list the remaining files."""
    found: list[dict[str, Any]] = []
    base = folder / "base"
    for step in (1, 2):
        save(base, step)
    for at in range(1, 200):
        place = folder / f"at{at}"
        shutil.copytree(base, place)
        if wait(fork(save_killed, place, 3, at)) == [0]:
            return found
        step = restored(place)
        save(place, 4)
        names = sorted(path.name for path in place.glob("step-*"))
        found.append({"at": at, "restored": step, "then": restored(place), "names": names})
    return found


def killed_in_the_write(folder: Path) -> dict[str, Any]:
    """Kill a save of a large state when a part of it is in the temporary file."""
    place = folder / "large"
    save(place, 1, size=LARGE)
    pid = fork(lambda: save(place, 2, size=LARGE))
    file, until = place / "step-00000002.tmp" / "shared.pt", time.monotonic() + PATIENCE_S
    while not (file.exists() and file.stat().st_size > LARGE // 4) and time.monotonic() < until:
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    left = file.stat().st_size if file.exists() else 0
    return {"codes": wait(pid), "left": left, "restored": restored(place, size=LARGE)}


def disk_full(folder: Path) -> dict[str, Any]:
    """Save on a file system with room for one large checkpoint but not for two, else under a limit of file size."""
    place = folder / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "none", str(place)], check=False).returncode == 0
    try:
        if not mounted:
            save(place, 1, size=1 << 20)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, resource.RLIM_INFINITY))
        return {"mounted": mounted, **filled(place)}
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def filled(place: Path) -> dict[str, Any]:
    """Save until it fails, in the foreground and in the background; record the error and the remaining files."""
    if not list(place.iterdir()):
        save(place, 1, size=1 << 20)
    messages = [refused(lambda: save(place, 2, size=1 << 20))]
    _, model = keeper(place, 3, size=1 << 20)
    behind = checkpoint(place, model=model, own={"model": {"step": 3}}, background=True)
    behind.save(3)
    messages += [refused(lambda: behind.save(4)), refused(behind.close)]
    names = sorted(path.name for path in place.glob("step-*"))
    return {"messages": messages, "names": names, "restored": restored(place, size=1 << 20)}


def refused(work: Callable[[], object]) -> str:
    """Return the text of a raised SaveError, "" without one."""
    try:
        work()
    except SaveError as error:
        return str(error)
    return ""


def main() -> None:
    """Run all."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found = {
        "killed": killed_everywhere(folder),
        "write": killed_in_the_write(folder),
        "full": disk_full(folder),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
