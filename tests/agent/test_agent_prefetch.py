"""Prefetcher: which files a process uses, and that they are read as its user, within bounds."""

from __future__ import annotations

import json
import mmap
import os
import pwd
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from agent_rig import Agent
from test_agent_checkpoint import TERMS, host, job  # noqa: F401 (a fixture)
from test_agent_link import Service, service  # noqa: F401 (a fixture)

from cadenza.policies.core.model import JobKey
from cadenza.sidecar.agent.prefetch import file_reader, open_files, prefetcher
from cadenza.sidecar.agent.prefetch.prefetcher import read_as
from cadenza.sidecar.client.session.prefetch_hints import FileList
from cadenza.sidecar.orders import VERSION, CheckpointOrder, Files, FilesOrder, PrefetchOrder, Report
from cadenza.slurm_plugin.service.agents.prefetch_orders import PrefetchOrders

USER = os.geteuid() or pwd.getpwnam("nobody").pw_uid
"""A user as whom files may be read: this one, or for root another."""
A = JobKey(1, 0)


def test_a_process_uses_what_it_has_mapped_opened_imported_and_named(tmp_path: Path) -> None:
    for name in ("mapped", "opened", "named", "gone"):
        (tmp_path / name).write_bytes(b"x" * 5000)
    told = FileList()
    with (tmp_path / "mapped").open("rb") as first, (tmp_path / "opened").open("rb"), (tmp_path / "gone").open("rb"):
        data = mmap.mmap(first.fileno(), 0, access=mmap.ACCESS_READ)
        (tmp_path / "gone").unlink()
        told.name(tmp_path / "named")
        found = open_files.files_of([os.getpid()])
        data.close()
        told.close()
    names = {path.rsplit("/", 1)[1] for path in found if path.startswith(str(tmp_path))}
    assert names == {"mapped", "opened", "named"}
    assert json.__spec__.cached in found, "imported, long since closed"
    assert any("libc.so" in path for path in found)
    assert len(found) == len(set(found))


PIPE = """
import ctypes, os, sys
libc, here = ctypes.CDLL(None), sys.argv[1].encode()
libc.unshare(0x20000)  # CLONE_NEWNS
libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE
libc.mount(b"none", here, b"tmpfs", 0, None)
os.mkfifo(here + b"/memfd:cadenza-files x")
pipe = os.open(here + b"/memfd:cadenza-files x", os.O_RDWR)
libc.umount2(here, 2)  # MNT_DETACH
print(os.readlink(f"/proc/self/fd/{pipe}"), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="without root a mount needs a user namespace, which may be forbidden")
def test_a_pipe_that_has_the_name_of_a_list_of_files_is_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PIPE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "/memfd:cadenza-files x\n"
        with ThreadPoolExecutor(1) as pool:
            try:
                assert pool.submit(open_files.files_of, [child.pid]).result(10.0)
            finally:
                child.kill()


def test_a_process_that_is_gone_uses_nothing() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert open_files.files_of([child.pid]) == ()


def test_files_are_read_within_the_bytes_and_directories_whole(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name, size in {"a": 1000, "deep/b": 2000, "deep/er/c": 3 << 20, "big": 9 << 20}.items():
        (tmp_path / name).write_bytes(b"x" * size)
    os.mkfifo(tmp_path / "pipe")
    paths = (str(tmp_path / "big"), str(tmp_path / "a"), str(tmp_path / "deep"), str(tmp_path / "none"),
             str(tmp_path / "pipe"))  # fmt: skip
    told = file_reader.read_all([path.encode() for path in paths], 5 << 20)
    assert told == {"files": 3, "bytes": 3000 + (3 << 20), "left_out": 3}
    assert read_as(USER, paths, 0) == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as somebody else")
def test_what_the_user_may_not_read_is_not_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    secret, plain = tmp_path / "secret", tmp_path / "plain"
    secret.write_bytes(b"x" * 100)
    secret.chmod(0o600)
    plain.write_bytes(b"x" * 10)
    link = tmp_path / "link"
    link.symlink_to(secret)
    done = subprocess.run(
        ["/usr/bin/env", "python3", "-I", file_reader.__file__, "1000"],
        input=f"{secret}\n{plain}\n{link}".encode(), capture_output=True, user="nobody", group="nogroup",
        extra_groups=[], check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"nobody cannot run python here: {done.stderr[-200:]!r}")
    assert json.loads(done.stdout) == {"files": 1, "bytes": 10, "left_out": 2}


def test_under_systemd_the_reader_is_outside_the_agents_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("systemd-run", "setpriv"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prefetcher.outside(7, 8, [8, 9]) == [] or prefetcher.SYSTEMD.is_dir()
    monkeypatch.setattr(prefetcher, "SYSTEMD", tmp_path)
    words = prefetcher.outside(7, 8, [8, 9])
    assert words[:2] == [str(tmp_path / "systemd-run"), "--scope"]
    assert words[-5:] == [str(tmp_path / "setpriv"), "--reuid=7", "--regid=8", "--groups=8,9", "--"]
    (tmp_path / "systemd-run").unlink()
    assert prefetcher.outside(7, 8, [8, 9]) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can read as somebody else")
def test_a_reader_in_a_scope_has_the_rights_of_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scope without systemd: its options are dropped, and the rest of the command runs as it is."""
    run = tmp_path / "systemd-run"
    run.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    run.chmod(0o755)
    monkeypatch.setattr(prefetcher, "SYSTEMD", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    secret = tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    secret.chmod(0o640)
    try:
        told = read_as(USER, (str(secret), "/etc/passwd"), 1 << 20)
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"nobody cannot run python here: {error}")
    assert (told["files"], told["left_out"]) == (1, 1)


def test_a_user_that_the_host_does_not_know_is_an_error() -> None:
    with pytest.raises(KeyError):
        read_as(4_000_123, ("/etc/passwd",), 1000)


def test_nothing_is_read_as_root() -> None:
    with pytest.raises(ValueError, match="never read as root"):
        read_as(0, ("/etc/shadow",), 1000)


def test_lists_go_only_where_the_service_sent_the_job() -> None:
    prefetches = PrefetchOrders()
    assert prefetches.begin(A, ("n1", "n2"), ("n3",), 7) == [("n1", FilesOrder(VERSION, *A))]
    files = Files(VERSION, "n1", *A, ("/a",))
    assert prefetches.on_files(files) == [("n3", PrefetchOrder(VERSION, *A, 7, ("/a",)))]
    assert prefetches.on_files(Files(VERSION, "n9", *A, ("/etc/shadow",))) == []
    assert prefetches.on_files(Files(VERSION, "n1", 2, 0, ("/a",))) == []


@pytest.mark.slow
def test_the_agent_says_what_a_job_uses_then_its_checkpoint_and_reads_for_one_to_come(
    host: Agent, service: Service, tmp_path: Path  # noqa: F811
) -> None:  # fmt: skip
    job(host, service, "--saves")
    service.order(FilesOrder, 1)
    files = service.wait_for(Files)
    assert files.job == 1
    assert any("libc.so" in path for path in files.paths)
    service.order(CheckpointOrder, 1, **TERMS)
    lease = service.lease(1, lambda lease: lease.saved)
    assert service.wait_for(Files).paths == (lease.note.rpartition(": ")[2],)
    (tmp_path / "data").write_bytes(b"x" * 70)
    service.order(PrefetchOrder, 9, uid=os.geteuid(), paths=(str(tmp_path / "data"), "/none"))
    report = service.wait_for(Report, lambda report: report.prefetched)
    read = (9, 1, 70, "") if os.geteuid() else (9, 0, 0, "its files were not read: files are never read as root")
    assert [(one.job, one.files, one.bytes, one.note) for one in report.prefetched] == [read]
