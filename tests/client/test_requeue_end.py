"""End of a rank that waits with its checkpoint on the disk: at once by SIGTERM, and with its parent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from cadenza.sidecar.client.session import checkpoint_request

STANDS = """
import os, signal, sys, time
from cadenza.sidecar.client.session import checkpoint_request
signal.signal(signal.SIGTERM, lambda *_: None)
with checkpoint_request.default_sigterm():
    print(os.getpid(), flush=True)
    time.sleep(60)
"""


def ended(pid: int) -> bool:
    """Wait until a process that is not a child has ended."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], 20)[0])
    finally:
        os.close(descriptor)


def test_sigterm_ends_it_although_the_script_only_takes_note_of_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", STANDS], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    child.stdout.readline()
    child.terminate()
    assert child.wait(20) == -signal.SIGTERM


def test_it_ends_with_the_batch_script() -> None:
    shell = subprocess.Popen(
        ["/bin/sh", "-c", '"$0" -c "$1"; echo not here', sys.executable, STANDS], stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    pid = int(shell.stdout.readline())
    shell.kill()
    assert ended(pid)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_the_handler_is_put_back(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        with checkpoint_request.default_sigterm():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGTERM, before)
