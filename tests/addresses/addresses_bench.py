"""The library of addresses that stay, compiled with stand-ins for the driver and the runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "sidecar" / "agent" / "addresses"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-rdynamic")
WARNINGS = ("-std=gnu11", "-Wall", "-Wextra", "-Werror")
LIMIT_S = 60


@dataclass(frozen=True)
class Bench:
    """A folder with the stand-ins, and a compiler."""

    folder: Path
    compiler: str

    def compile(self, output: str, *words: str | Path) -> Path:
        """Compile into the folder."""
        target = self.folder / output
        subprocess.run([self.compiler, "-g", *WARNINGS, *map(str, words), "-o", str(target)], check=True)
        return target

    def runtime(self, version: int) -> Path:
        """Return the stand-in for a runtime whose symbols have a version, as CUDA's have."""
        name = f"libcudart.so.{version}"
        script = self.folder / f"{version}.map"
        script.write_text(f"{name} {{ global: *; }};")
        return self.compile(
            name, "-shared", "-fPIC", f"-Wl,--version-script={script}", f"-Wl,-soname,{name}", HERE / "stub_runtime.c"
        )

    def linked(self, output: str, source: Path, *flags: str) -> Path:
        """Return the driving program with the library linked into it."""
        words = ["-O1", f"-I{SOURCE}", *flags, HERE / "drive.c", source, self.folder / "libcudart.so.13"]
        return self.compile(output, *words)

    def run(self, program: Path, words: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a program on two new simulated GPUs."""
        with tempfile.TemporaryDirectory(dir=self.folder) as gpus:
            paths = {"SIMULATED_GPUS": f"{gpus}/0:{gpus}/1", "LD_LIBRARY_PATH": str(self.folder)}
            return subprocess.run(
                [str(program), *words],
                env={**os.environ, **paths, **environment},
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )


def make_bench(folder: Path) -> Bench:
    """Compile the stand-ins into a folder."""
    compiler = shutil.which("cc")
    assert compiler, "these tests compile C: install gcc or another compiler that is called cc"
    bench = Bench(folder, compiler)
    bench.compile("libcuda.so.1", "-O1", "-shared", "-fPIC", HERE.parent / "agent" / "stub_driver.c", "-ldl")
    bench.runtime(13)
    return bench
