"""cadenzad as a process: start, only one, reload, orderly end, and its watchdog after a kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_rig import BOOKS, FileSlurm, books, eventually, job, make_keys, write_config

from cadenza.policies.core.decision import Decision, Memory
from cadenza.policies.core.model import JobKey
from cadenza.sidecar.clock import SystemClock
from cadenza.slurm_plugin.service.failover.lock import StoreLock
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

A = JobKey(1, 0)

pytestmark = pytest.mark.slow

IMPATIENT = """
import sys
from cadenza.slurm_plugin.service import main
main.TAKE_OVER_S = 0.3
sys.argv[1:] = ["--config", sys.argv[1]]
main.main()
"""


class Site:
    """A directory with everything that a daemon needs, and the daemons started in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_keys(folder / "keys")
        self.config = write_config(folder)
        self.slurm = FileSlurm(folder / "books.json")
        self.slurm.write(books(job(1)))
        self.store = folder / "cadenza.db"
        self.children: list[subprocess.Popen[bytes]] = []
        self.log = folder / "log"

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "cadenza.slurm_plugin.service.main",
                    "--config",
                    self.config,
                    *options,
                ],
                stderr=log,
                env={**os.environ, BOOKS: str(self.slurm.path), "PYTHONPATH": str(Path(__file__).parent)},
            )
        self.children.append(child)
        return child

    def says(self, text: str) -> bool:
        return text in self.log.read_text(encoding="utf-8")

    def rounds(self) -> int:
        if not self.store.exists():
            return 0
        with StoreReader(self.store) as reader:
            last = reader.round()
        return last.number if last else 0

    def remember(self, memory: Memory) -> None:
        """Write a round down whose actions we say have left, as a service that dies then would have."""
        store = SqliteStore(self.store, SystemClock())
        store.begin(self.slurm.read(), Decision((), memory), (), memory)
        store.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    for child in found.children:
        child.kill()
        child.wait()


def test_one_round_and_a_clear_error(site: Site) -> None:
    assert site.start("--once").wait(10) == 0
    assert site.rounds() == 1
    site.config.write_text("[service]\npolls = 3\n", encoding="utf-8")
    assert site.start("--once").wait(10) == 2
    assert site.says("cadenzad: ")
    assert site.says("did you mean poll_s?")


def test_a_service_that_cannot_open_its_store_releases_our_jobs(site: Site) -> None:
    """As on a full disk after the controller was started anew: there is no watchdog of an earlier service."""
    site.slurm.write(books(job(1, state="SUSPENDED"), job(2, state="SUSPENDED")))
    site.remember(Memory(suspended=frozenset({A})))
    site.store.with_name("cadenza.db-wal").symlink_to(site.folder / "away" / "wal")
    (site.folder / "STOP").touch()
    assert site.start().wait(10) == 3
    assert site.slurm.actions() == []
    (site.folder / "STOP").unlink()
    assert site.start().wait(10) == 3
    assert site.slurm.actions() == ["Unsuspend 1"]
    assert site.says("check its directory, owner and free space")


def test_life_of_a_service(site: Site) -> None:
    """Start, a second one refused, reload, and an end that lets our jobs go."""
    suspended = job(1, state="SUSPENDED")
    mine = job(2, state="PENDING", slurm_priority=0, nodes=(), held_at_restart=True)
    site.slurm.write(books(suspended, mine))
    site.remember(Memory(suspended=frozenset({A})))
    (site.folder / "STOP").touch()  # so that no round does what the end is to do
    child = site.start()
    eventually(lambda: site.rounds() >= 3)
    assert StoreLock(site.store).owner() == child.pid
    assert site.slurm.actions() == []
    site.config.write_text("[service]\nmode = 'never'\n", encoding="utf-8")
    child.send_signal(signal.SIGHUP)
    eventually(lambda: site.says("the old settings stay in force"))
    child.terminate()
    assert child.wait(10) == 0
    assert site.slurm.actions() == ["Unsuspend 1", "Release 2"]
    assert site.says("JOBID=1 ACTION=Unsuspend REASON=")
    assert not site.says("Traceback")


def test_kill_9_and_nobody_comes_back(site: Site) -> None:
    site.slurm.write(books(job(1, state="SUSPENDED"), job(2, state="SUSPENDED")))
    site.remember(Memory(suspended=frozenset({A})))
    (site.folder / "STOP").touch()
    child = site.start()
    eventually(lambda: site.rounds() >= 2)
    site.slurm.down.touch()
    child.kill()
    child.wait()
    eventually(lambda: site.says("release failed (SlurmDownError"))
    site.slurm.down.unlink()
    eventually(site.slurm.actions)
    assert site.slurm.actions() == ["Unsuspend 1"], "job 2 was suspended by somebody else"
    with StoreReader(site.store) as reader:
        assert "killed" in reader.job_record(1).actions[0].reason


def test_kill_9_and_a_new_service_takes_over(site: Site) -> None:
    write_config(site.folder, watchdog_grace_s=30)
    site.slurm.write(books(job(1, state="SUSPENDED")))
    site.remember(Memory(suspended=frozenset({A})))
    (site.folder / "STOP").touch()
    first = site.start()
    eventually(lambda: site.rounds() >= 2)
    first.kill()
    first.wait()
    rounds = site.rounds()
    second = site.start()
    eventually(lambda: site.says(f"a new cadenzad (pid {second.pid}) has taken over"))
    eventually(lambda: site.rounds() > rounds)  # before its first round it does not handle signals yet
    assert site.slurm.actions() == []
    assert second.poll() is None
    second.terminate()
    assert second.wait(20) == 0


def test_a_second_service_is_refused(site: Site) -> None:
    lock = StoreLock(site.store)
    lock.take()
    try:
        child = subprocess.run([sys.executable, "-c", IMPATIENT, str(site.config)], capture_output=True, check=False)
    finally:
        lock.release()
    assert child.returncode == 1
    assert f"pid {os.getpid()} owns this store".encode() in child.stderr


def test_importing_is_free() -> None:
    program = (
        "import signal, sys; before = signal.getsignal(signal.SIGTERM)\n"
        "import cadenza.slurm_plugin.service.main, logging, threading\n"
        "assert signal.getsignal(signal.SIGTERM) is before and not logging.root.handlers\n"
        "assert threading.active_count() == 1 and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
