"""The library of addresses that stay, as it is shipped, and in the program that drives it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from addresses_bench import SANITIZED, SOURCE, Bench, make_bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A folder with the stand-ins."""
    return make_bench(tmp_path_factory.mktemp("addresses"))


@pytest.fixture(scope="session")
def preloaded(bench: Bench) -> Path:
    """The library as it is shipped."""
    target = bench.folder / "build"
    shutil.copytree(SOURCE, target, ignore=shutil.ignore_patterns("*.so"))
    subprocess.run(["make", "--silent", f"CC={bench.compiler}", "-C", str(target)], check=True)
    return target / "libcadenza-addresses.so"


@pytest.fixture(scope="session")
def sanitized(bench: Bench) -> Path:
    """The driving program with the library in it, under the sanitizers where the compiler has them."""
    source = SOURCE / "addresses.c"
    try:
        return bench.linked("sanitized", source, *SANITIZED)
    except subprocess.CalledProcessError:
        return bench.linked("linked", source, "-rdynamic")
