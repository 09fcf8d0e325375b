"""Tests of this folder run in a process of their own, whose torch has the simulated GPU as its accelerator.

Autograd counts a process's devices once, so a process of the other tests could not take one more.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
PATIENCE_S = 120.0
sys.path.append(str(HERE.parent / "client"))  # its agent and its training loop serve here, too


class DeviceProcess:
    """The process with the GPU; one that a test ended is replaced for the next test."""

    def __init__(self, folder: Path, environment: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, test: dict[str, Any]) -> str:
        """Run a test; return the traceback of its failure, "" for success."""
        if self._process is None:
            self._start()
        assert self._process is not None
        try:
            self._socket.sendall(json.dumps(test).encode() + b"\n")
            answer = self._answers.readline()
        except OSError as error:
            self.end()
            return f"no answer from the process with the GPU: {error}"
        if answer:
            return str(json.loads(answer))
        code = self._process.wait()
        self.end()
        return f"the process with the GPU ended: {signal.Signals(-code).name if code < 0 else code}"

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
        self._process = None

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(PATIENCE_S)
        self._answers = self._socket.makefile()
        command = [sys.executable, str(HERE / "device_process.py"), str(self._folder), str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=self._environment)
        theirs.close()


@pytest.fixture(scope="session")
def device_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceProcess]:
    """The process of all tests of this folder."""
    pytest.importorskip("torch", reason="needs the extra `client`")
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("needs a C++ compiler to build the simulated GPU")
    # The compiler's time is no test's.
    subprocess.run([sys.executable, "-c", "import simulated_gpu; simulated_gpu.library()"], cwd=HERE, check=True)
    process = DeviceProcess(tmp_path_factory.mktemp("gpu"))
    yield process
    process.end()


@pytest.fixture(scope="session")
def preloaded_process(
    device_process: DeviceProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DeviceProcess]:
    """The process of the modules that set PRELOADED: the addresses of its GPU memory can stay."""
    assert device_process
    look = "import json, simulated_gpu; print(json.dumps(simulated_gpu.preloaded()))"
    environment = json.loads(subprocess.check_output([sys.executable, "-c", look], cwd=HERE, text=True))
    process = DeviceProcess(tmp_path_factory.mktemp("preloaded"), environment)
    yield process
    process.end()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in the process with the GPU."""
    if HERE not in pyfuncitem.path.parents:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    given = {name: str(value) if isinstance(value := pyfuncitem.funcargs[name], Path) else value for name in names}
    preloaded = getattr(pyfuncitem.module, "PRELOADED", False)
    process = pyfuncitem._request.getfixturevalue("preloaded_process" if preloaded else "device_process")
    test = {"module": pyfuncitem.path.stem, "name": pyfuncitem.originalname, "given": given}
    if failure := process.run(test):
        pytest.fail(failure, pytrace=False)
    return True
