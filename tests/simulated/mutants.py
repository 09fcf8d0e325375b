#!/usr/bin/env python3
"""Change the engine in one place after the other and see that a test of the simulated GPU fails each time.

``tests/simulated/mutants.py [NAME…]`` names the test that notices each change, and exits with 1 if one is not noticed.
test_mutants.py runs it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import simulated_gpu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT_S = 30
ENGINE, MEMORY, IN_PLACE = "engine.py", "host_memory.py", "addresses/address_move.py"
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
        "                copy_within(place, staging, self._bounds)\n",
        "                pass\n",
    ),
    "small storages do not come back": (
        ENGINE,
        "                copy_within(staging, place, self._bounds)\n",
        "                pass\n",
    ),
    "all batches in one place": (
        ENGINE,
        "self._memory[batch.offset : batch.offset + batch.nbytes]",
        "self._memory[: batch.nbytes]",
    ),
    "host memory is not pinned": (
        ENGINE,
        "self._buffer.reserve(copy_plan.total(plan), self._devices[0] if self._devices else None)",
        "self._buffer.reserve(copy_plan.total(plan), None)",
    ),
    "pinned memory is not let go": (MEMORY, "code = accelerator.unregister_host(address)", "code = 0"),
    "memory comes back on the script's stream": (
        ENGINE,
        "                with device_streams.allocating_on(batch.device, stream):\n",
        "                with contextlib.nullcontext():\n",
    ),
    "in place, no wait for the script's work": (
        IN_PLACE,
        "                self._accelerator.synchronize(torch.device(self._kind, index))",
        "                pass",
    ),
    "in place, segments go before their copies": (
        IN_PLACE,
        "                        event.synchronize()",
        "                        pass",
    ),
    "in place, no wait for the copies at the end": (IN_PLACE, "stream.synchronize()", "pass"),
    "in place, a failed way out is not undone": (IN_PLACE, "            self._undo(gone)\n", ""),
    "in place, a failed way back keeps its memory": (
        IN_PLACE,
        "            self._library.release(self.plan.segments)\n",
        "",
    ),
    "in place, a freed segment is written": (IN_PLACE, " if one.segment in living", ""),
}
"""File, and pairs of old and new text, by what the change does."""
WAITS = "test_offload_simulated::test_a_move_waits_for_the_work_before_it_in_all_streams"
PINNED = "test_offload_simulated::test_the_host_copy_is_pinned_once_and_let_go_at_the_end"
BEHIND = "test_addresses_simulated::test_segments_go_behind_their_copies_and_the_script_may_write_at_once_after"
CAUGHT = {
    "a failed way out is not undone": (
        "test_offload_simulated::test_work_that_fails_between_the_copies_leaves_all_where_it_was"
    ),
    "a failed way back keeps its memory": (
        "test_offload_simulated::test_a_neighbor_that_keeps_the_memory_leaves_the_state_away"
    ),
    "the allocator keeps the memory": (
        "test_offload_simulated::test_memory_is_released_after_its_copy_and_read_after_its_way_back"
    ),
    "host memory is not pinned": PINNED,
    "pinned memory is not let go": PINNED,
    "memory comes back on the script's stream": (
        "test_defects_simulated::test_a_prefetched_tensor_comes_back_on_its_stream"
    ),
    "in place, no wait for the script's work": (
        "test_addresses_simulated::test_a_move_in_place_waits_for_the_work_before_it"
    ),
    "in place, segments go before their copies": BEHIND,
    "in place, no wait for the copies at the end": BEHIND,
    "in place, a failed way out is not undone": (
        "test_addresses_simulated::test_a_move_that_fails_leaves_all_where_it_was"
    ),
    "in place, a failed way back keeps its memory": (
        "test_addresses_simulated::test_a_copy_back_that_fails_leaves_all_away"
    ),
    "in place, a freed segment is written": (
        "test_addresses_simulated::test_a_segment_freed_while_it_is_away_is_not_written"
    ),
}
"""The first test that notices each change, if it is not WAITS."""


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


def broken(name: str) -> None:
    """Let this process import the engine with a change; it must not have imported the engine before."""
    file, *pairs = MUTANTS[name]
    module = f"cadenza.sidecar.client.offload.{file.removesuffix('.py').replace('/', '.')}"
    if module in sys.modules:
        raise SystemExit(f"{module} was imported before it could be changed")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    code = compile(changed(Path(spec.origin).read_text(), tuple(pairs)), spec.origin, "exec")
    found = sys.modules[module] = importlib.util.module_from_spec(spec)
    exec(code, vars(found))  # noqa: S102 - the engine's own source
    setattr(importlib.import_module(module.rpartition(".")[0]), module.rpartition(".")[2], found)


def run_tests(name: str, tests: Sequence[str], folder: Path, out: TextIO) -> None:
    """Run tests against a changed engine in this process, up to the first that fails; write each name before it."""
    if name:
        broken(name)
    import device_process  # noqa: PLC0415 - it imports the engine

    gpu = simulated_gpu.create(folder / "gpu", **device_process.NORMAL)
    simulated_gpu.load([folder / "gpu"])
    simulated_gpu.GPU = gpu
    for test in tests:
        module, _, function = test.partition("::")
        arguments = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        for given in ({"stream": "other"}, {"stream": "own"}) if "stream" in arguments else ({},):
            print(test, file=out, flush=True)
            if failure := device_process.run({"module": module, "name": function, "given": given}, gpu):
                print(failure, file=sys.stderr)
                return
    print(file=out, flush=True)


def noticed(name: str, tests: Sequence[str]) -> str:
    """Return the first of some tests that fails with a change of the engine, "" if none does.

    It runs in a fork, because torch takes seconds to start. A test that ends the process or never ends has failed.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "out").open("w+") as out:
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(LIMIT_S)
                run_tests(name, tests, Path(folder), out)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        out.seek(0)
        return out.read().splitlines()[-1]


def main() -> int:
    """Try the changes that the command line names, all by default, and none first.

    The library of addresses that stay must be there when the process starts.
    """
    if "LD_PRELOAD" not in os.environ:
        command = [sys.executable, *sys.argv]
        os.execve(sys.executable, command, {**os.environ, **simulated_gpu.preloaded()})  # noqa: S606
    sys.path[:0] = [str(HERE), str(ROOT / "benchmarks" / "gpu"), str(HERE.parent / "client")]
    import torch._dynamo  # noqa: PLC0415 - the first optimizer needs it, and the forks then have it
    import torch.distributed.checkpoint  # noqa: PLC0415 - as do the tests

    build = "import simulated_gpu; simulated_gpu.library()"
    subprocess.run([sys.executable, "-c", build], cwd=HERE, check=True)  # a process that has it could not fork
    torch.set_num_threads(1)
    if noticed("", [WAITS, *CAUGHT.values()]):
        raise SystemExit("a test fails without a change")
    missed = 0
    for name in sys.argv[1:] or MUTANTS:
        test = noticed(name, [CAUGHT.get(name, WAITS)])
        print(f"{name}: {test or 'NOT NOTICED'}", flush=True)
        missed += not test
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
