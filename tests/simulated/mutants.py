#!/usr/bin/env python3
"""Change the engine in one place after the other and see that a test of the simulated GPU fails each time.

``tests/simulated/mutants.py [NAME…]`` works in a copy of the sidecar, takes some minutes, and exits with 1 if a change
is not noticed. It is run by hand.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENGINE, MEMORY = "engine.py", "host_memory.py"
MUTANTS = {
    "no wait for the script's work before a move": (ENGINE, "            accelerator.synchronize(place)\n", ""),
    "no wait for a copy before its release": (
        ENGINE,
        "                        done.synchronize()",
        "                        pass",
    ),
    "no wait for the copies at the end": (ENGINE, "            self._stream.synchronize()", "            pass"),
    "an event before its copy": (
        ENGINE,
        "        with torch.no_grad(), self._context:\n",
        (
            "        early = None if self._stream is None else self._stream.record_event()\n"
            "        with torch.no_grad(), self._context:\n"
        ),
        "            return None if self._stream is None else self._stream.record_event()",
        "            return early",
    ),
    "an event of the script's stream": (
        ENGINE,
        "            return None if self._stream is None else self._stream.record_event()",
        (
            "            pass\n"
            "        return None if self._stream is None else torch.accelerator.current_stream().record_event()"
        ),
    ),
    "release in the order of start, before the wait": (
        ENGINE,
        "                    if done is not None:\n                        done.synchronize()\n",
        "",
        "                        self._segments[index].storage.resize_(0)\n        except",
        (
            "                        self._segments[index].storage.resize_(0)\n"
            "                    if done is not None:\n                        done.synchronize()\n        except"
        ),
    ),
    "a failed way out is not undone": (ENGINE, "                self._refill(complete)\n", "                pass\n"),
    "a failed way back keeps its memory": (
        ENGINE,
        (
            "            self._staging = 0\n            for segment in self._segments:\n"
            "                segment.storage.resize_(0)\n"
        ),
        "            self._staging = 0\n",
    ),
    "the allocator keeps the memory": (ENGINE, "            accelerator.empty_cache()\n", ""),
    "small storages do not reach the host": (
        ENGINE,
        "                _copy_within(place, staging, self._bounds)\n",
        "                pass\n",
    ),
    "small storages do not come back": (
        ENGINE,
        "                _copy_within(staging, place, self._bounds)\n",
        "                pass\n",
    ),
    "all batches in one place": (
        ENGINE,
        "self._memory[batch.offset : batch.offset + batch.nbytes]",
        "self._memory[: batch.nbytes]",
    ),
    "host memory is not pinned": (
        ENGINE,
        "self._buffer.reserve(copy_plan.total(plan), accelerator)",
        "self._buffer.reserve(copy_plan.total(plan), None)",
    ),
    "pinned memory is not let go": (MEMORY, "accelerator.unregister_host(address)", "0"),
    "memory comes back on the script's stream": (
        ENGINE,
        "                    with device_streams.allocating_on(segment.storage.device, segment.stream):\n",
        "                    with contextlib.nullcontext():\n",
    ),
}
"""File, and pairs of old and new text, by what the change does."""
QUICK = "not computes_the_same"
"""The tests that are tried: those without whole training jobs."""


def changed(text: str, pairs: tuple[str, ...]) -> str:
    """Return a text with each old part, which must occur once, replaced by the new one."""
    for old, new in zip(pairs[::2], pairs[1::2], strict=True):
        if text.count(old) != 1:
            raise SystemExit(f"{old!r} occurs {text.count(old)} times")
        text = text.replace(old, new)
    return text


def copied(folder: Path) -> Path:
    """Return the package in a folder, which PYTHONPATH can name: the sidecar is a copy, and the rest are links."""
    package = folder / "cadenza"
    package.mkdir()
    shutil.copytree(ROOT / "sidecar", package / "sidecar", ignore=shutil.ignore_patterns("__pycache__"))
    for other in ("policies", "profiler", "slurm_plugin"):
        (package / other).symlink_to(ROOT / other)
    return package


def change(package: Path, name: str) -> tuple[Path, str]:
    """Make a change in a copy of the package; return the file and its text before."""
    file, *pairs = MUTANTS[name]
    path = package / "sidecar" / "client" / "offload" / file
    original = path.read_text()
    path.write_text(changed(original, tuple(pairs)))
    return path, original


def noticed(package: Path, name: str) -> str:
    """Return the first test that fails with a change of the engine, "" if none does."""
    path, original = change(package, name)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", "-k", QUICK]
    command += [str(Path(__file__).with_name(f"test_{kind}_simulated.py")) for kind in ("offload", "defects")]
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    path.write_text(original)
    found = re.search(r"^FAILED \S+?::(\S+)", run.stdout, re.MULTILINE)
    if run.returncode not in (0, 1):
        raise SystemExit(run.stdout + run.stderr)
    return found.group(1) if found else ""


def main() -> int:
    """Try the changes that the command line names, all by default; the package of a temporary folder comes first."""
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        package = copied(Path(folder))
        for name in sys.argv[1:] or MUTANTS:
            test = noticed(package, name)
            print(f"{name}: {test or 'NOT NOTICED'}", flush=True)
            missed += not test
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
