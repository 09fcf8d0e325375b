"""The socket at which users read the record of their own jobs: whom it answers, and what it survives."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from service_rig import as_nobody, books, job, refused, write_config

from cadenza.policies.core.decision import Decision, Memory
from cadenza.sidecar import local_socket
from cadenza.sidecar.clock import SystemClock
from cadenza.sidecar.orders import VERSION, Switched
from cadenza.slurm_plugin.cli import common
from cadenza.slurm_plugin.cli.main import main
from cadenza.slurm_plugin.errors import ServiceError, StoreError
from cadenza.slurm_plugin.service.job_access import JobAccess
from cadenza.slurm_plugin.service.owner_socket import OwnerSocket, ask, ask_latest
from cadenza.slurm_plugin.service.store.reader import StoreReader
from cadenza.slurm_plugin.service.store.writer import SqliteStore

NOBODY = pwd.getpwnam("nobody")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Path]:
    """A store with a job of nobody's and one of ada's, and the socket beside it."""
    store = SqliteStore(tmp_path / "cadenza.db", SystemClock())
    mine, theirs = job(1, user="nobody"), job(2)
    store.begin(books(mine, theirs), Decision((), Memory(), {mine.key: "waits", theirs.key: "runs"}), (), Memory())
    store.record([Switched(VERSION, "n1", number, 0, "yield", 100.0, 0.1, 0.1, 0.2, 5) for number in (1, 2)])
    server = OwnerSocket(tmp_path / "jobs.sock", tmp_path / "cadenza.db", SystemClock())
    server.start()
    yield tmp_path
    server.close()
    store.close()
    assert not server.path.exists()


def test_users_read_their_own_jobs_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(site / "jobs.sock", 2, 20).reason == "runs", "the service's own user and root read all"
    monkeypatch.setattr(local_socket, "peer_uid", lambda _: NOBODY.pw_uid)
    record = ask(site / "jobs.sock", 1, 20)
    assert (record.reason, record.job.user if record.job else None) == ("waits", "nobody")
    for other in (2, 3):
        with pytest.raises(ServiceError, match=f"job {other}: nothing on record of a job of yours"):
            ask(site / "jobs.sock", other, 20)


def test_top_shows_users_their_own_jobs_only(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(site, store=str(site / "closed.db"))
    monkeypatch.setattr(local_socket, "peer_uid", lambda _: NOBODY.pw_uid)
    latest = ask_latest(site / "jobs.sock", 0.0)
    last = latest.round()
    assert last is not None
    assert [one.user for one in last.snapshot.jobs] == ["nobody"]
    assert list(last.decision.reasons.values()) == ["waits"]
    assert [row.job for row in latest.switches] == [1]
    view = json.loads(CliRunner().invoke(main, ["top", "--once", "--json", "--config", str(config)]).stdout)
    assert [(one["id"], one["reason"]) for one in view["jobs"]] == [(1, "waits")]
    assert view["idle_gpus"] == 4 - 2, "others' jobs have GPUs, too"
    monkeypatch.setattr(local_socket, "peer_uid", lambda _: 4_000_000_000)
    with pytest.raises(ServiceError, match="does not know uid"):
        ask_latest(site / "jobs.sock", 0.0)
    away = write_config(site, store=str(site / "closed.db"), jobs_socket=str(site / "away" / "jobs.sock"))
    for words in (("top", "--once"), ("why", "1")):
        done = CliRunner().invoke(main, [*words, "--config", str(away)])
        assert done.exit_code == 3
        assert "jobs run, and Slurm starts them, as usual" in done.stderr


def test_who_may_read(site: Path) -> None:
    access = JobAccess(site / "cadenza.db", SystemClock())
    for uid in (0, os.geteuid()):
        assert access.of_uid(uid).everything
    assert access.of_uid(NOBODY.pw_uid).may_read("nobody")
    assert not access.of_uid(NOBODY.pw_uid).may_read("ada")
    assert not access.of_uid(4_000_000_000).may_read("nobody"), "a user that this machine does not know"
    assert not access.of_uid(4_000_000_000).may_read("")


@pytest.mark.parametrize(
    "request_",
    [
        b"", b"\n", b"{\n", b"[" * 300, b'{"job":0}\n', b'{"job":1e400}\n', b'{"job":' + b"9" * 400, b"\xff\xfe\n",
        b'{"job":1,"last":100000}\n', b'{"job":1,"x":1}\n', b'{"job":"1; DROP TABLE rounds"}\n',
    ],
)  # fmt: skip
def test_no_request_ends_it(site: Path, request_: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.connect(str(site / "jobs.sock"))
        link.sendall(request_)
        link.shutdown(socket.SHUT_WR)
        answer = json.loads(link.recv(65536))
    assert (answer["record"], answer["error"]) == (None, "no request of this version")
    assert ask(site / "jobs.sock", 1, 20).reason == "waits"


def test_a_client_that_says_nothing_delays_the_next_one_only(site: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.connect(str(site / "jobs.sock"))
        assert ask(site / "jobs.sock", 1, 20).reason == "waits"


def test_a_user_who_keeps_connections_open_delays_nobody_else(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "REQUEST_TIMEOUT_S", 600.0)
    monkeypatch.setattr(local_socket, "peer_uid", lambda _: NOBODY.pw_uid)
    with ExitStack() as stack:
        greedy = [stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) for _ in range(40)]
        for link in greedy:
            link.settimeout(10.0)
            link.connect(str(site / "jobs.sock"))
        for link in greedy[local_socket.CLIENTS_PER_USER :]:
            assert link.recv(1) == b"", "closed at once"
        monkeypatch.setattr(local_socket, "peer_uid", lambda _: NOBODY.pw_uid + 1)
        with pytest.raises(ServiceError, match="nothing on record of a job of yours"):
            ask(site / "jobs.sock", 1, 20)
        greedy[0].sendall(b'{"job":1}\n')
        assert json.loads(greedy[0].recv(65536))["record"]["reason"] == "waits"


def test_no_thread_to_spare_costs_one_request(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(10)
            link.connect(str(site / "jobs.sock"))
            assert link.recv(1) == b""
    assert ask(site / "jobs.sock", 1, 20).reason == "waits"


def test_a_request_that_comes_byte_by_byte_has_its_time(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_socket, "REQUEST_TIMEOUT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as slow:
        slow.settimeout(0.01)
        slow.connect(str(site / "jobs.sock"))
        sent = 0
        with contextlib.suppress(OSError):  # until it is closed
            while sent < local_socket.MAX_REQUEST:
                slow.send(b" ")
                sent += 1
                with contextlib.suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    break
    assert sent < local_socket.MAX_REQUEST


def test_a_store_that_cannot_be_read_is_no_end(site: Path) -> None:
    (site / "cadenza.db").rename(site / "away.db")
    with pytest.raises(ServiceError, match="the record cannot be read"):
        ask(site / "jobs.sock", 1, 20)
    (site / "away.db").rename(site / "cadenza.db")
    assert ask(site / "jobs.sock", 1, 20).reason == "waits"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_kernel_says_who_asks(site: Path) -> None:
    for path in (site, *site.parents):
        if path != Path("/") and path.stat().st_uid == 0:
            path.chmod(path.stat().st_mode | 0o011)
    assert as_nobody(lambda: ask(site / "jobs.sock", 1, 20).reason == "waits")
    assert as_nobody(lambda: refused(lambda: ask(site / "jobs.sock", 2, 20), ServiceError))
    assert as_nobody(lambda: refused(lambda: StoreReader(site / "cadenza.db"), StoreError))


def test_why_asks_the_service_when_the_store_cannot_be_read(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(site)

    def unreadable(*_: object) -> None:
        raise StoreError("cadenza.db: unable to open database file; may this user read it?")

    monkeypatch.setattr(common, "open_store", unreadable)
    monkeypatch.setattr(local_socket, "peer_uid", lambda _: NOBODY.pw_uid)
    run = partial(CliRunner().invoke, main)
    assert "job 1: waits" in run(["why", "1", "--config", str(config)]).stdout
    refusal = run(["why", "2", "--config", str(config)])
    assert (refusal.exit_code, "nothing on record of a job of yours" in refusal.stderr) == (1, True)
    (site / "jobs.sock").rename(site / "gone")
    unable = run(["why", "1", "--config", str(config)])
    assert (unable.exit_code, "may this user read it?" in unable.stderr) == (3, True)
    (site / "gone").rename(site / "jobs.sock")
